"""Runs any number of lives by hand: `python -m tests.stateful --runs 2000 --workers 1 --log FILE`.

Resumable: `--log FILE` keeps a line for each batch of lives, and a batch that is in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests import torchvision_shim
from tests.stateful.running import MACHINES, failure_of

BATCH = 10  # lives from one seed: the first one of hypothesis is always the shortest


def main() -> int:
    torchvision_shim.install()
    options = _options()
    done = _known(options.log)
    seeds = range(options.start, options.start + -(-options.runs // BATCH))
    work = [(name, seed, options.shrink) for seed in seeds for name in options.machines if (name, seed) not in done]
    records, began = [done[key] for key in done if key[1] in seeds and key[0] in options.machines], time.monotonic()
    with multiprocessing.get_context("fork").Pool(options.workers, _one_thread) as pool:
        for number, record in enumerate(pool.imap_unordered(_run, work), 1):
            records.append(record)
            if options.log:
                with options.log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if record["failure"]:
                _say(f"=== {record['machine']}, seed {record['seed']}\n{record['failure']}")
            if number % 20 == 0:
                lives, seconds = number * BATCH, time.monotonic() - began
                _say(f"--- {lives} of {len(work) * BATCH} lives, {seconds / lives:.2f} s each")
    failures = sum(bool(record["failure"]) for record in records)
    _say(f"{len(records) * BATCH} lives, {failures} batches with a fault")
    return 1 if failures else 0


def _run(work: tuple[str, int, bool]) -> dict[str, Any]:
    name, seed, shrinks = work
    return {"machine": name, "seed": seed, "failure": failure_of(name, BATCH, seed, shrinks=shrinks)}


def _known(log: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    if log is None or not log.exists():
        return {}
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {(record["machine"], record["seed"]): record for record in records}


def _one_thread() -> None:
    torch.set_num_threads(1)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.stateful", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="lives of each machine, rounded up to tens")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--log", type=Path, help="a file of results, to which a later run adds")
    parser.add_argument("--shrink", action="store_true", help="look for fewer steps that fail the same way (slow)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
