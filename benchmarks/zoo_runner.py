"""Runs a function over the architectures of the zoo: in one or more processes, each within limits, and resumable.

A process is replaced when an architecture takes too long, when it takes too much memory (which ends it), and after a
few architectures, since exporters leave much behind in memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit
from zoo_models import ZOO

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

Record = dict[str, Any]
Examine = Callable[[str], Record]
ARCHITECTURES_PER_PROCESS = 12


def run_zoo(
    benchmark: str,
    examine: Examine,
    description: str,
    arguments: Sequence[str] | None = None,
    *,
    summary: Callable[[list[Record]], str] | None = None,
    per_process: int = ARCHITECTURES_PER_PROCESS,
) -> None:
    """The command line of a benchmark: a JSON line for each architecture, exit status 1 where one failed.

    `summary`: the text that ends the run, of the records of this run and of those it skipped. `per_process`: after so
    many architectures a process is replaced; 1 gives each its own peak of memory.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="globs on the names (timm/resnet18 or resnet18), commas between")
    parser.add_argument("--skip", default="", help="globs on the names that are left out, commas between")
    parser.add_argument(
        "--json", type=Path, help="append the lines to this file; what it has of this commit is skipped"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--threads", type=int, help="of torch in each process; default: all, or 1 with several workers")
    parser.add_argument("--seconds", type=float, default=300, help="the limit for one architecture")
    parser.add_argument("--gigabytes", type=float, default=12, help="the limit of memory of each process")
    options = parser.parse_args(arguments)
    commit = _commit()
    names = [name for name in ZOO if _matches(name, options.only) and not _matches(name, options.skip)]
    done = {name: record for name, record in _done(options.json, benchmark, commit).items() if name in names}
    threads = options.threads or (torch.get_num_threads() if options.workers == 1 else 1)
    records = list(done.values())
    todo = [name for name in names if name not in done]
    limits = (threads, options.seconds, options.gigabytes, per_process)
    for record in _in_parallel(todo, examine, options.workers, limits):
        records.append(record)
        emit({"benchmark": benchmark, "commit": commit, **record}, options.json)
    failed = sum(not record["ok"] for record in records)
    print(f"{failed} of {len(names)} failed", file=sys.stderr)
    if summary is not None:
        print(summary(records), file=sys.stderr)
    sys.exit(1 if failed else 0)


def _matches(name: str, globs: str) -> bool:
    return any(
        fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(name.rpartition("/")[2], glob)
        for glob in globs.split(",")
        if glob
    )


# Threads, seconds, gigabytes, architectures per process.
Limits = tuple[int, float, float, int]


def _in_parallel(names: Sequence[str], examine: Examine, workers: int, limits: Limits) -> Iterator[Record]:
    """The records as they come. Each worker is a thread that waits for a process of its own."""
    if workers == 1:
        yield from examined(names, examine, *limits)
        return
    with ThreadPoolExecutor(workers) as pool:
        threads, seconds, gigabytes, _ = limits
        jobs = [
            pool.submit(lambda name=name: list(examined([name], examine, threads, seconds, gigabytes, 1)))
            for name in names
        ]
        try:
            for job in as_completed(jobs):
                yield from job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def examined(
    names: Iterable[str],
    examine: Examine,
    threads: int,
    seconds: float,
    gigabytes: float,
    per_process: int = ARCHITECTURES_PER_PROCESS,
) -> Iterator[Record]:
    """A record for each name; a failure is a record too."""
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the children read it
    process, pipe, used = None, None, 0
    try:
        for name in names:
            if process is None:
                pipe, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, examine, threads, gigabytes), daemon=True)
                process.start()
                theirs.close()
                pipe.recv()  # it has imported what it needs: the clock starts now
                used = 0
            start = time.perf_counter()
            error = ""
            record: Record | None = None
            try:
                pipe.send(name)
                record = pipe.recv() if pipe.poll(seconds) else None
                error = f"Timeout: took more than {seconds:.0f} s"
            except (EOFError, BrokenPipeError, ConnectionResetError):
                error = f"Killed: ended its process (the limit of memory is {gigabytes:g} GB)"
            used += 1
            if record is None or used == per_process:
                process.kill()
                process.join()
                process = None
            yield record or {"model": name, "ok": False, "error": error}
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    finally:
        if process is not None:
            process.kill()


def _serve(pipe: Connection, examine: Examine, threads: int, gigabytes: float) -> None:
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torchvision_shim.install()
    pipe.send("ready")
    while True:
        name = pipe.recv()
        try:
            record = examine(name)
        except Exception as error:
            record = {
                "model": name,
                "ok": False,
                "error": "".join(traceback.format_exception_only(error)).strip()[:600],
                "where": traceback.format_exc()[-700:],
            }
        pipe.send(record)


def _commit() -> str:
    """The checkout's commit, with a `+` where files differ from it."""
    if shutil.which("git") is None:
        return "unknown"
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno", "sparsebit"], cwd=ROOT, capture_output=True)
    return head.stdout.strip() + ("+" if changed.stdout else "")


def _done(file: Path | None, benchmark: str, commit: str) -> dict[str, Record]:
    if file is None or not file.is_file():
        return {}
    records = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return {r["model"]: r for r in records if r["benchmark"] == benchmark and r.get("commit") == commit}
