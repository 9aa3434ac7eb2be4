"""What calibration costs, against plain forwards of the same batches in the same run.

    python benchmarks/calibration.py [--images 64] [--json FILE]

Lines:
* `time`: wall and CPU ratio of calibrating forwards + calc_qparams to plain forwards, per observer, ResNet-18 at 224²;
* `verify`: the same calibration with and without the comparison of the first batch with the model's own code;
* `memory`: peak resident memory over the model's own forward at 64 and 1,024 images;
* `search`: CPU seconds of a whole calibration of ResNet-20 with 256 images, per observer.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq")
BATCH = 16


def config(observer: str) -> dict[str, Any]:
    section = {"QUANTIZER": {"BIT": 8}, "OBSERVER": {"TYPE": observer}}
    return {"DEVICE": "cpu", "SCHEDULE": {"FUSE_BN": True}, "W": section, "A": section}


def resnet18() -> torch.nn.Module:
    torchvision_shim.install()
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return resnet18(weights=None).eval()


def images(count: int) -> Iterator[torch.Tensor]:
    """Batches made on the fly, so that the data itself takes no memory."""
    for index in range(count // BATCH):
        yield torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(index))


def measure_time(count: int, rounds: int, observers: list[str]) -> Iterator[dict[str, Any]]:
    """Ratios of interleaved rounds. The plain model is the captured one with BN folded: both do the same work."""
    from sparsebit.quantization import QuantModel, parse_qconfig

    model = resnet18()
    batches = list(images(count))
    for observer in observers:
        qmodel = QuantModel(model, parse_qconfig(config(observer)))

        def plain(qmodel: QuantModel = qmodel) -> None:
            qmodel.set_quant(w_quant=False, a_quant=False)
            _forwards(qmodel, batches)

        def calibrate(qmodel: QuantModel = qmodel) -> None:
            qmodel.prepare_calibration(keep_inputs=False)
            _forwards(qmodel, batches)
            qmodel.calc_qparams()

        plain()
        pairs = [(_timed(plain), _timed(calibrate)) for _ in range(rounds)]
        ratios = {
            kind: statistics.median(cal[i] / base[i] for base, cal in pairs) for i, kind in enumerate(("wall", "cpu"))
        }
        yield {
            "what": "time",
            "observer": observer,
            "images": count,
            "ratio_wall": round(ratios["wall"], 3),
            "ratio_cpu": round(ratios["cpu"], 3),
            "plain_seconds": round(statistics.median(base[0] for base, _ in pairs), 2),
        }


def measure_verification(rounds: int) -> Iterator[dict[str, Any]]:
    """A calibration of eight batches with the first one compared, against one without, interleaved."""
    from sparsebit.quantization import QuantModel, parse_qconfig

    model, batches = resnet18(), list(images(8 * BATCH))
    for observer in ("minmax", "mse"):
        variants = [QuantModel(model, parse_qconfig(config(observer)), verify=verify) for verify in (False, True)]

        def calibrate(qmodel: QuantModel) -> None:
            qmodel.prepare_calibration(keep_inputs=False)
            _forwards(qmodel, batches)
            qmodel.calc_qparams()

        pairs = [[_timed(functools.partial(calibrate, qmodel)) for qmodel in variants] for _ in range(rounds)]
        yield {
            "what": "verify",
            "observer": observer,
            "batches": len(batches),
            "ratio_wall": round(statistics.median(on[0] / off[0] for off, on in pairs), 3),
            "ratio_cpu": round(statistics.median(on[1] / off[1] for off, on in pairs), 3),
        }


def measure_memory(cases: list[str]) -> Iterator[dict[str, Any]]:
    """Each case in a process of its own: peak resident memory is a property of a process."""
    for case in cases:
        peaks = {}
        for count in (64, 1024):
            command = [sys.executable, __file__, "--peak", case, str(count)]
            peaks[count] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["mib"]
        yield {
            "what": "memory",
            "case": case,
            "mib_64": peaks[64],
            "mib_1024": peaks[1024],
            "growth": round(peaks[1024] / peaks[64] - 1, 4),
        }


def peak(case: str, count: int) -> None:
    from sparsebit.quantization import QuantModel, parse_qconfig

    qmodel = QuantModel(resnet18(), parse_qconfig(config(case if case in OBSERVERS else "minmax")))
    if case != "plain":
        qmodel.prepare_calibration()
    with torch.no_grad():
        for batch in images(count):
            qmodel(batch)
    if case != "plain":
        qmodel.calc_qparams(asym=case == "asym")
    print(json.dumps({"mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)}))


def measure_search() -> Iterator[dict[str, Any]]:
    """From `prepare_calibration` to the end of `calc_qparams`, forwards included."""
    from models import cifar

    from sparsebit.quantization import QuantModel, parse_qconfig

    task = cifar("resnet20", num_images=1)
    for observer in OBSERVERS:
        qmodel = QuantModel(task.model, parse_qconfig(config(observer)))
        _forwards(qmodel, task.calibration[:1])  # one-time costs of torch are nobody's

        def calibrate(qmodel: QuantModel = qmodel) -> None:
            qmodel.prepare_calibration()
            _forwards(qmodel, task.calibration)
            qmodel.calc_qparams()

        wall, cpu = _timed(calibrate)
        yield {
            "what": "search",
            "model": "resnet20",
            "images": 256,
            "observer": observer,
            "cpu_seconds": round(cpu, 2),
            "seconds": round(wall, 2),
        }


def _forwards(model: torch.nn.Module, batches: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for batch in batches:
            model(batch)


def _timed(action: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--observers", default=",".join(OBSERVERS), help="of the time part")
    parser.add_argument("--only", choices=("time", "verify", "memory", "search"))
    parser.add_argument("--cases", default=",".join(("plain", *OBSERVERS, "asym")), help="of the memory part")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "IMAGES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak[0], int(options.peak[1]))
        return
    parts = {
        "time": lambda: measure_time(options.images, options.rounds, options.observers.split(",")),
        "verify": lambda: measure_verification(options.rounds),
        "memory": lambda: measure_memory(options.cases.split(",")),
        "search": measure_search,
    }
    for name, part in parts.items():
        if options.only in (None, name):
            for record in part():
                emit({"benchmark": "calibration", **record}, options.json)


if __name__ == "__main__":
    main()
