"""Time in ONNX Runtime of a pruned model beside the dense one, in float and in int8.

    python benchmarks/sparse.py speed [--models resnet50] [--macs 0.5] [--round-to 16] [--threads 1,2] [--json FILE]

Random weights, 224 x 224, batch 1. Every group of channels has the same ratio, the smallest that keeps the MACs; widths
stay multiples of `--round-to`, the block of the runtime's float kernels. All files are open side by side and take
turns.
`ratio`: of CPU time with one thread, which other processes hardly change, and of wall time with several. The int8 files
have passed the parity gate, whose words are in the record.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import emit
from torch import nn

EXAMPLE = (1, 3, 64, 64)  # a small image is enough to find channels


def smaller(model: nn.Module, image: torch.Tensor, macs: float, round_to: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model with the smallest ratio, in hundredths, that leaves at most this share of the MACs."""
    from sparsebit.sparse import SparseModel, model_size

    start = time.perf_counter()
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured"}}, torch.zeros(EXAMPLE)).eval()
    dense = model_size(model, image).macs
    for percent in range(round(100 * (1 - macs**0.5)), 100):
        smodel.config = smodel.config.replace("SPARSER.RATIO", percent / 100)
        smodel.calc_params()
        small = smodel.shrink(round_to).eval()
        left = model_size(small, image).macs / dense
        if left <= macs:
            seconds = round(time.perf_counter() - start, 1)
            return small, {"pruning_ratio": percent / 100, "macs_left": round(left, 3), "pruning_seconds": seconds}
    raise SystemExit(f"no ratio leaves {macs:g} of the MACs")


def int8_file(case: Any, file: Path) -> str:
    """Quantize as the deployment benchmark does, with the parity gate; gives what the gate said."""
    from deploy_models import batch, batches
    from deploy_peers import OBSERVER

    from sparsebit import PROFILES, quantize
    from sparsebit.quantization import parse_qconfig

    settings = PROFILES["onnxruntime"].recommended()
    settings["A"] = {**settings["A"], "OBSERVER": {"TYPE": OBSERVER}}
    calibration = list(batches(case.calibration, case.calibration_batch))
    qmodel = quantize(case.model, calibration, parse_qconfig(settings).replace("DEVICE", "cpu"))
    parity = qmodel.export_onnx(batch(case.evaluation[:1]), file, check=[batch(case.evaluation[:1])])
    return str(parity)


def speed(options: argparse.Namespace) -> None:
    from deploy_models import CASES, batch
    from deploy_peers import export_float

    from sparsebit.deploy.sessions.runtime_sessions import open_session, runtime_version
    from sparsebit.deploy.sessions.timing import interleaved

    for name in options.models.split(","):
        case = CASES[name]()
        image = batch(case.evaluation[:1])
        small, record = smaller(case.model, image, options.macs, options.round_to)
        pruned = replace(case, model=small)
        record |= {"benchmark": "sparse_speed", "model": name, "round_to": options.round_to}
        with tempfile.TemporaryDirectory() as folder:
            names = ("dense", "pruned", "int8", "pruned_int8")
            files = {one: Path(folder) / f"{one}.onnx" for one in names}
            export_float(case, files["dense"], files["dense"])
            export_float(pruned, files["pruned"], files["pruned"])
            record["parity"] = {
                "int8": int8_file(case, files["int8"]),
                "pruned_int8": int8_file(pruned, files["pruned_int8"]),
            }
            record["bytes"] = {one: file.stat().st_size for one, file in files.items()}
            for threads in map(int, options.threads.split(",")):
                runs = {}
                for one, file in files.items():
                    session = open_session(file, num_threads=threads)
                    runs[one] = partial(
                        session.run, dict(zip(session.inputs, case.evaluation[0].values(), strict=True))
                    )
                found = interleaved(runs, budget_s=options.seconds)
                kind = "cpu" if threads == 1 else "wall"
                result = {
                    "runtime": f"onnxruntime {runtime_version('onnxruntime')}",
                    "threads": threads,
                    "ratio": {one: round(getattr(found[one], f"{kind}_ratio"), 4) for one in names},
                    "wall_ratio": {one: round(found[one].wall_ratio, 4) for one in names},
                    "wall_ms": {one: round(found[one].wall_ms, 3) for one in names},
                    "num_rounds": found["dense"].num_rounds,
                }
                emit({**record, **result}, options.json)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50", help="of benchmarks/deploy.py")
    parser.add_argument("--macs", type=float, default=0.5, help="the share that stays")
    parser.add_argument("--round-to", type=int, default=16)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, for each number of threads")
    parser.add_argument("--json", type=Path)
    speed(parser.parse_args(arguments))
