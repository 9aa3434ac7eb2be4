"""Runs a function over the architectures of the zoo: one after the other, each within limits, and resumable.

A process of its own does the work: it is replaced when an architecture takes too long, when it takes too much memory
(which ends it), and after a few architectures, since exporters leave much behind in memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
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


def run_zoo(benchmark: str, examine: Examine, description: str) -> None:
    """The command line of a benchmark: a JSON line for each architecture, exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default="*", help="glob on the names; several with commas between them")
    parser.add_argument(
        "--json", type=Path, help="append the lines to this file; what it has of this commit is skipped"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, in the process")
    parser.add_argument("--seconds", type=float, default=300, help="the limit for one architecture")
    parser.add_argument("--gigabytes", type=float, default=12, help="the limit of memory")
    options = parser.parse_args()
    commit = _commit()
    globs = options.only.split(",")
    names = [name for name in ZOO if any(fnmatch.fnmatch(name, glob) for glob in globs)]
    done = _done(options.json, benchmark, commit)
    failed = sum(not is_ok for name, is_ok in done.items() if name in names)
    todo = [name for name in names if name not in done]
    for record in examined(todo, examine, options.threads, options.seconds, options.gigabytes):
        failed += not record["ok"]
        emit({"benchmark": benchmark, "commit": commit, **record}, options.json)
    print(f"{failed} of {len(names)} failed", file=sys.stderr)
    sys.exit(1 if failed else 0)


def examined(
    names: Iterable[str], examine: Examine, threads: int, seconds: float, gigabytes: float
) -> Iterable[Record]:
    """A record for each name; a failure is a record too."""
    context = multiprocessing.get_context("spawn")
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
            except (EOFError, BrokenPipeError):
                error = f"Killed: ended its process (the limit of memory is {gigabytes:g} GB)"
            yield record or {"model": name, "ok": False, "error": error}
            used += 1
            if record is None or used == ARCHITECTURES_PER_PROCESS:
                process.kill()
                process.join()
                process = None
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
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno", "sparsebit"], cwd=ROOT, capture_output=True)
    return head.stdout.strip() + ("+" if changed.stdout else "")


def _done(file: Path | None, benchmark: str, commit: str) -> dict[str, bool]:
    if file is None or not file.is_file():
        return {}
    records = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return {r["model"]: r["ok"] for r in records if r["benchmark"] == benchmark and r.get("commit") == commit}
