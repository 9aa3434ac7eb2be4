"""Float ONNX files of four opsets: loaded, quantized for ONNX Runtime, and compared with the same model from PyTorch.

    python benchmarks/onnx_in_opsets.py [--models resnet50,minilm] [--steps load,pytorch,nncf] [--json FILE]

Each model is exported with opset 11, 13 and 17 (torch's exporter of TorchScript) and 21 (torch.export). Prints a JSON
line for each file: the difference of the loaded module from ONNX Runtime and how many layers have their PyTorch names;
for each int8 file: accuracy, and the CPU time of a call on one thread over the float file's, all files of a model in
turns. The peers (ONNX Runtime's quantizer, NNCF, AIMET-ONNX where installed) get the file of opset 17.
Steps whose line is in `--json` are skipped where their file is still in `--folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deploy_peers
import numpy as np
import torch
from common import emit, sqnr_db
from deploy_models import CASES, Case, _images, _judge_classes, _made_up_images, _random, _timm, batch, batches, run
from models import cifar, efficientnet_lite0, torchvision_shim, yolov5n
from torch import nn

OPSETS = {11: False, 13: False, 17: False, 21: True}  # with torch.export or not
PEER_OPSET = 17
LOADS = [f"load {opset}" for opset in OPSETS]
TASKS = {"yolov5n": yolov5n, "efficientnet_lite0": efficientnet_lite0, "resnet20": partial(cifar, "resnet20", 2000)}
LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)
SECONDS = 10.0  # of timing for each model


def model_case(name: str, *, is_scored: bool) -> Case:
    """The model with its data; without the inputs of its evaluation, which take a while, if no file is scored."""
    if name == "minilm":
        case = CASES[name]()
        case.model.model.set_attn_implementation("eager")  # torch's attention function has no form before opset 14
        return case
    if name == "resnet50" and is_scored:
        return _random(name, partial(_timm, name))
    if is_scored:
        return CASES[name]()
    if name == "resnet50":
        torchvision_shim.install()  # timm imports torchvision
        net, some = _timm(name).eval(), _images(_made_up_images(4, 1))
    else:
        task = TASKS[name]()
        net, some = task.model.eval(), _images(task.calibration[0][:4])
    return Case(name, net, some, some, _judge_classes)


def export(case: Case, opset: int, file: Path) -> None:
    """The float file, with a dynamic batch."""
    example, names = batch(case.evaluation[:2]), list(case.evaluation[0])
    args = tuple(example.values()) if isinstance(example, dict) else (example,)
    how: dict[str, Any] = {"input_names": names, "opset_version": opset, "dynamo": OPSETS[opset], "verbose": False}
    if OPSETS[opset]:
        how |= {"dynamic_shapes": tuple({0: torch.export.Dim.DYNAMIC} for _ in names), "external_data": False}
    else:
        how |= {"dynamic_axes": {name: {0: "batch"} for name in (*names, "y")}, "output_names": ["y"]}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(case.model.eval(), args, str(file), **how)


def load(case: Case, file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The module of a file, and how near it is to ONNX Runtime."""
    import sparsebit
    from sparsebit.deploy.loading.compare import difference

    start = time.process_time()
    module = sparsebit.load_onnx(file, list(batches(case.calibration[:2], 2)))
    record: dict[str, Any] = {"cpu_seconds": round(time.process_time() - start, 1)}
    session = sparsebit.open_session(file, optimize=False)
    some = case.evaluation[:4]
    worst = max(
        difference(session.run({name: feed[key] for name, key in zip(session.inputs, feed, strict=True)})[0], found)
        for feed, found in zip(some, run(module, some), strict=True)
    )
    own, found = ({n for n, m in net.named_modules() if isinstance(m, LAYERS)} for net in (case.model, module))
    same = len({name.removeprefix("model.") for name in own} & {name.removeprefix("model.") for name in found})
    return module, record | {"difference": worst, "layers": len(own), "layers_loaded": len(found), "same_names": same}


def from_file(case: Case, floating: Path, file: Path) -> dict[str, Any]:
    return deploy_peers.sparsebit(dataclasses.replace(case, model=load(case, floating)[0]), floating, file, **_OURS)


def aimet(case: Case, floating: Path, file: Path) -> dict[str, Any]:
    """AIMET-ONNX with its default settings: 8 bits per channel, ranges of TF-enhanced."""
    import onnx
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(onnx.load(floating), param_type="int8", activation_type="int8")
    sim.compute_encodings(case.calibration)
    onnx.save(sim.to_onnx_qdq(), file)
    return {"settings": "defaults"}


_OURS = {"backend": "onnxruntime"}
TOOLS: dict[str, deploy_peers.Tool] = {
    "pytorch": partial(deploy_peers.sparsebit, **_OURS),
    **{f"opset {opset}": from_file for opset in OPSETS},
    "onnxruntime": deploy_peers.ort_static,
    "nncf": deploy_peers.nncf,
    "nncf tuned": partial(deploy_peers.nncf, tuned=True),
    "aimet-onnx": aimet,
}


def examine(name: str, folder: Path, steps: list[str], results: Path | None) -> None:
    tools = {tool: make for tool, make in TOOLS.items() if tool in steps}
    case = model_case(name, is_scored=bool(tools))
    folder.mkdir(parents=True, exist_ok=True)
    done = _done(results, name)
    for opset in OPSETS:
        file = folder / f"float {opset}.onnx"
        if f"load {opset}" in steps and (f"load {opset}" not in done or not file.is_file()):
            _step(name, f"load {opset}", results, partial(_loaded, case, opset, file))
    if not tools:
        return
    reference = _outputs(folder / f"float {PEER_OPSET}.onnx", case)
    for tool, make in tools.items():
        opset = int(tool.split()[1]) if tool.startswith("opset") else PEER_OPSET
        file, floating = folder / f"{tool}.onnx", folder / f"float {opset}.onnx"
        if tool == "nncf tuned" and case.is_transformer:
            continue
        if tool not in done or not file.is_file():
            _step(name, tool, results, partial(_quantized, make, case, floating, file, reference))
    _time(name, folder, case, results)


def _loaded(case: Case, opset: int, file: Path) -> dict[str, Any]:
    export(case, opset, file)
    return load(case, file)[1]


def _quantized(make: deploy_peers.Tool, case: Case, floating: Path, file: Path, reference: Any) -> dict[str, Any]:
    start = time.process_time()
    found = make(case, floating, file)
    record = {key: value for key, value in found.items() if isinstance(value, (str, int, float))}
    outputs = _outputs(file, case)
    record |= {"tool_cpu_seconds": round(time.process_time() - start, 1), **case.judge(outputs, reference)}
    joined = (torch.from_numpy(np.concatenate([one.ravel() for one in many])) for many in (reference, outputs))
    return {"sqnr_db": round(sqnr_db(*joined), 2), **record}


def _outputs(file: Path, case: Case) -> list[np.ndarray]:
    import sparsebit

    session = sparsebit.open_session(file, num_threads=1)
    return [session.run(_named(session, feed))[0].copy() for feed in case.evaluation]


def _named(session: Any, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return feed if set(feed) == set(session.inputs) else dict(zip(session.inputs, feed.values(), strict=True))


def _time(name: str, folder: Path, case: Case, results: Path | None) -> None:
    import sparsebit
    from sparsebit.deploy.sessions.timing import interleaved

    runs: dict[str, Callable[[], Any]] = {}
    for tool in ("float", *TOOLS):
        file = folder / (f"float {PEER_OPSET}.onnx" if tool == "float" else f"{tool}.onnx")
        if file.is_file():
            session = sparsebit.open_session(file, num_threads=1)
            runs[tool] = partial(session.run, _named(session, case.evaluation[0]))
    for tool, latency in interleaved(runs, budget_s=SECONDS).items():
        emit({"benchmark": "onnx_in_opsets", "model": name, "step": f"time {tool}", **latency.to_dict()}, results)


def _step(name: str, step: str, results: Path | None, work: Callable[[], dict[str, Any]]) -> None:
    try:
        record = {"ok": True, **work()}
    except Exception as error:  # a failure is a result here
        text = "".join(traceback.format_exception_only(error)).strip()[:500]
        record = {"ok": False, "error": text, "where": traceback.format_exc()[-500:]}
    emit({"benchmark": "onnx_in_opsets", "model": name, "step": step, **record}, results)


def _done(results: Path | None, name: str) -> set[str]:
    lines = results.read_text().splitlines() if results is not None and results.is_file() else []
    return {record["step"] for record in map(json.loads, lines) if record["model"] == name and record.get("ok")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,yolov5n,minilm,efficientnet_lite0")
    parser.add_argument("--steps", default=",".join(["load", *TOOLS]), help="of " + ", ".join(["load", *TOOLS]))
    parser.add_argument("--folder", type=Path, default=deploy_peers.ROOT / "build" / "onnx_in_opsets")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = [step for word in options.steps.split(",") for step in (LOADS if word == "load" else [word])]
    for name in options.models.split(","):
        examine(name, options.folder / name, steps, options.json)


if __name__ == "__main__":
    main()
