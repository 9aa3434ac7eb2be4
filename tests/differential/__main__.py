"""Runs any number of nets by hand: `python -m tests.differential --nets 2000 --seed 0 --workers 1 --log FILE`.

Resumable: `--log FILE` keeps a line for each net, and a net that is in the file is not run again; with `--again`, those
with a fault are. The first net of each kind of fault is shrunk and printed as code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tests import export_caches
from tests.differential.grammar import generate
from tests.differential.judges import FAST, available
from tests.differential.judging import judged
from tests.differential.net import Net
from tests.differential.shrinking import smallest_net
from tests.fuzz.choices import Choices

_KEPT = ExitStack()


def main() -> int:
    options = _options()
    done = _known(options.log, again=options.again)
    seeds = range(options.seed, options.seed + options.nets)
    work = [(seed, tuple(options.judges)) for seed in seeds if seed not in done]
    records, began = [done[seed] for seed in seeds if seed in done], time.monotonic()
    kinds = {kind for record in records for kind in record["faults"]}
    with multiprocessing.get_context("fork").Pool(options.workers, _prepared) as pool:
        for number, record in enumerate(pool.imap_unordered(_run, work), 1):
            records.append(record)
            if options.log:
                with options.log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            for kind, details in record["faults"].items():
                _say(f"=== seed {record['seed']}: {kind}: {details}")
                if kind not in kinds and options.shrink:
                    _say(pool.apply(_shrunk, ((record["seed"], tuple(options.judges)), kind)))
                kinds.add(kind)
            if number % 100 == 0:
                _say(f"--- {number} of {len(work)} nets, {(time.monotonic() - began) / number:.2f} s each")
    return _summary(records)


def net_of(seed: int) -> Net:
    return generate(Choices.from_seed(seed))


def _run(work: tuple[int, tuple[str, ...]]) -> dict[str, Any]:
    seed, judges = work
    began = time.process_time()
    export_caches.read_translations_once()
    verdict = judged(net_of(seed), judges)
    return {
        "seed": seed,
        "outcome": verdict.outcome,
        "details": verdict.details,
        "faults": verdict.faults,
        "explained": verdict.explained,
        "judged": verdict.judged,
        "sites": verdict.num_sites,
        "seconds": round(time.process_time() - began, 3),
    }


def _shrunk(work: tuple[int, tuple[str, ...]], kind: str) -> str:
    seed, judges = work
    net = smallest_net(net_of(seed), lambda smaller: kind in judged(smaller, judges).faults)
    return f"{judged(net, judges).faults.get(kind, '')}\n{net.source()}"


def _summary(records: list[dict[str, Any]]) -> int:
    outcomes = Counter(record["outcome"] for record in records)
    judged = Counter(name for record in records for name in record["judged"])
    rules, kinds = Counter[str](), Counter[str]()
    for record in records:
        rules.update(dict.fromkeys(record["explained"], 1))
        kinds.update(dict.fromkeys(record["faults"], 1))
    seconds = sum(record["seconds"] for record in records) / max(len(records), 1)
    _say(f"{len(records)} nets, {seconds:.2f} s of CPU time each: {_listed(outcomes)}")
    _say(f"judged: {_listed(judged)}; {sum(record['sites'] for record in records)} sites")
    for title, found in (("explained", rules), ("fault", kinds)):
        for name, count in found.most_common():
            _say(f"{title}: {count} nets: {name}")
    return 1 if kinds else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _known(log: Path | None, *, again: bool) -> dict[int, dict[str, Any]]:
    if log is None or not log.exists():
        return {}
    records = {record["seed"]: record for record in map(json.loads, log.read_text().splitlines())}
    return {seed: record for seed, record in records.items() if not (again and record["faults"])}


def _prepared() -> None:
    """One thread, and the work that all exports share is done once."""
    torch.set_num_threads(1)
    _KEPT.enter_context(export_caches.composite_ops_once())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    installed = available()
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--nets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first net")
    parser.add_argument("--workers", type=int, default=1)
    default = [name for name in FAST if name in installed]
    parser.add_argument("--judges", nargs="+", choices=list(installed), default=default)
    parser.add_argument("--log", type=Path, help="a file of results, to which a later run adds")
    parser.add_argument("--again", action="store_true", help="also run those nets of the log that had a fault")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
