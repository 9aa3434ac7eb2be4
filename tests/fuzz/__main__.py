"""Runs any number of programs by hand: `python -m tests.fuzz --programs 20000 --start 0 --workers 2`.

Resumable: `--log FILE` keeps one line per program, and a program that is in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.choices import Choices
from tests.fuzz.grammar import FEATURES, STYLES, generate
from tests.fuzz.program import Program
from tests.fuzz.properties import PROPERTIES, judge, smallest_like


def main() -> int:
    options = _options()
    done = _known(options.log)
    seeds = [seed for seed in range(options.start, options.start + options.programs) if seed not in done]
    began, faults, outcomes = time.monotonic(), 0, Counter[str]()
    for record in done.values():
        faults += _count(record, outcomes)
    with multiprocessing.get_context("fork").Pool(options.workers, _one_thread) as pool:
        work = [(seed, options.properties, options.without, options.shrink) for seed in seeds]
        for number, record in enumerate(pool.imap_unordered(_run, work, chunksize=4), 1):
            faults += _count(record, outcomes)
            if options.log:
                with options.log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            for fault in record["faults"]:
                _say(f"=== seed {record['seed']}: {fault['property']}: {fault['outcome']}: {fault['details']}")
                _say(fault["program"])
            if number % 500 == 0:
                _say(f"--- {number} of {len(seeds)} programs, {(time.monotonic() - began) / number * 1000:.0f} ms each")
    _say(f"{options.programs} programs: " + ", ".join(f"{key} {n}" for key, n in sorted(outcomes.items())))
    _say(f"{faults} faults")
    return 1 if faults else 0


def program_of(seed: int, without: tuple[str, ...] = ()) -> Program:
    return generate(Choices.from_seed(seed), without=without)


def _run(work: tuple[int, list[str], tuple[str, ...], bool]) -> dict[str, Any]:
    seed, properties, without, shrinks = work
    program = program_of(seed, without)
    record: dict[str, Any] = {"seed": seed, "outcomes": {}, "faults": [], "refusals": []}
    for name in properties:
        verdict = judge(program, name)
        record["outcomes"][name] = verdict.outcome
        if verdict.outcome == "refused":
            record["refusals"].append(verdict.details[:300])
        if not verdict.is_fault:
            continue
        smallest = smallest_like(program, verdict) if shrinks else program
        verdict = judge(smallest, name) if shrinks else verdict
        record["faults"].append(
            {
                "property": name,
                "outcome": verdict.outcome,
                "details": verdict.details[:600],
                "program": smallest.source(),
                "features": sorted(smallest.features),
            }
        )
    return record


def _count(record: dict[str, Any], outcomes: Counter[str]) -> int:
    outcomes.update(f"{name}.{outcome}" for name, outcome in record["outcomes"].items())
    return len(record["faults"])


def _known(log: Path | None) -> dict[int, dict[str, Any]]:
    if log is None or not log.exists():
        return {}
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {record["seed"]: record for record in records}


def _one_thread() -> None:
    torch.set_num_threads(1)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--properties", nargs="+", choices=list(PROPERTIES), default=list(PROPERTIES))
    parser.add_argument("--without", nargs="*", choices=[*FEATURES, *STYLES], default=(), help="features to leave out")
    parser.add_argument("--log", type=Path, help="a file of results, to which a later run adds")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
