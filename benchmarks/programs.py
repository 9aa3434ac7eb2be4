"""Programs of other runtimes: our integer file, the float one, and torchao's XNNPACK quantizer in the same run.

    python benchmarks/programs.py [--only resnet20,timm/resnet18] [--target executorch] [--json FILE] [--samples 500]

Prints one JSON line per model, and skips those that the file of `--json` has already. Models: `resnet20`,
`mobilenetv2`, `vit`, `efficientnet_lite0`, `minilm` of the data folder, with accuracy on the first `--samples`; or
architectures of `zoo_models.py` with random weights. Times are CPU time of one thread in turns, batch 1. `ratio` is
against the float file of the same runtime.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit, sqnr_db
from torch import nn
from torch.utils import _pytree as pytree

import sparsebit
from sparsebit.deploy.programs.flat_program import flat_program
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.sessions.timing import interleaved
from sparsebit.execution.batches import as_call

sys.path.insert(0, str(ROOT / "tests"))
TOKENS = 64


@dataclass(frozen=True)
class Case:
    """`score`: of a function from one sample's arguments to its output; None: only the distance from float."""

    model: nn.Module
    calibration: list[Any]
    sample: Any
    score: Callable[[Callable[[Any], torch.Tensor]], float] | None = None


def images(name: str, count: int) -> Case:
    from models import TASKS

    task = TASKS[name]()
    assert task.images is not None and task.labels is not None
    labels = task.labels[:count]
    rows = list(task.images[:count].split(1))

    def score(run: Callable[[Any], torch.Tensor]) -> float:
        return 100 * float((torch.cat([run(row) for row in rows]).argmax(1) == labels).float().mean())

    return Case(task.model, task.calibration, rows[0], score)


def sentences(count: int) -> Case:
    from models import _minilm, _sentence_pairs
    from scipy.stats import spearmanr

    model, tokens = _minilm()
    model.config.return_dict = False

    def batch(texts: list[str]) -> dict[str, torch.Tensor]:
        found = tokens(texts)
        return {
            key: nn.functional.pad(value, (0, TOKENS - value.shape[1]))
            for key, value in found.items()
            if key != "token_type_ids"
        }

    dev, test = _sentence_pairs("stsb_dev.tsv"), _sentence_pairs("stsb_test.tsv")[:count]
    calibration = [batch([row[1] for row in dev[start : start + 16]]) for start in range(0, 128, 16)]

    def score(run: Callable[[Any], torch.Tensor]) -> float:
        def embedding(text: str) -> torch.Tensor:
            inputs = batch([text])
            mask = inputs["attention_mask"].unsqueeze(-1)
            return nn.functional.normalize((run(inputs) * mask).sum(1) / mask.sum(1), dim=1)

        scores = [float((embedding(row[1]) * embedding(row[2])).sum()) for row in test]
        return 100 * float(spearmanr(scores, [float(row[0]) for row in test]).statistic)

    return Case(model, calibration, batch([test[0][1]]), score)


def architecture(name: str, _: int) -> Case:
    from zoo import spread
    from zoo_models import ZOO

    torch.manual_seed(0)
    net, batch = ZOO[name]()
    spread(net.eval())
    one = pytree.tree_map(lambda x: x[:1], batch)
    return Case(net, [batch], one)


def case_of(name: str, count: int) -> Case:
    if name == "minilm":
        return sentences(count)
    return (architecture if "/" in name else images)(name, count)


def examine(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    target, peers = asked.target, asked.peers
    case, row = TARGETS[target], case_of(name, asked.samples)
    del row.calibration[max(1, asked.calibration // len(pytree.tree_leaves(row.calibration[0])[0])) :]
    record: dict[str, Any] = {"model": name, "target": target}
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}{case.ending}" for kind in ("float", "int8", "torchao")}
        args, kwargs = as_call(row.sample, row.model)
        signature = inspect.signature(row.model.forward)
        case.write(*flat_program(row.model, args, kwargs, signature, case), files["float"])
        qmodel = sparsebit.quantize(row.model, row.calibration, target)
        parity = qmodel.export(files["int8"], row.sample, check=row.calibration[:1])
        assert parity is not None
        record |= {"parity": str(parity), "exact": parity.is_exact}
        if "torchao" in peers and target == "executorch":
            record |= guarded(partial(by_torchao, row, files["torchao"]), "torchao_error")
        measured = {kind: file for kind, file in files.items() if file.is_file()}
        sessions = {kind: sparsebit.open_session(file, target, num_threads=1) for kind, file in measured.items()}
        if "torchao" in sessions:
            run = guarded(partial(first_output, sessions["torchao"], row.sample), "torchao_error")
            if "torchao_error" in run:  # its file is written and does not run
                record |= run
                del sessions["torchao"]
        facts: Any = sessions["int8"]
        record["delegated"] = facts.facts.num_inside / max(1, facts.facts.num_inside + facts.facts.num_outside)
        outside = [(one.op, one.cause) for one in facts.facts.layers if "does not take" in one.cause]
        record["outside"] = sorted({f"{outside.count(one)} {one[0]}: {one[1]}" for one in outside})
        record["bytes"] = {kind: file.stat().st_size for kind, file in measured.items()}
        record |= times(sessions, row.sample)
        record |= accuracy(sessions, row)
        if "onnx" in peers and row.score is not None:
            record |= guarded(partial(by_onnx, row, Path(folder) / "int8.onnx"), "onnx_error")
    return record


def first_output(session: Any, sample: Any) -> dict[str, Any]:
    session.run(feeds(session, sample))
    return {}


def times(sessions: dict[str, Any], sample: Any) -> dict[str, Any]:
    runs = {kind: partial(session.run, feeds(session, sample)) for kind, session in sessions.items()}
    found = interleaved(runs, budget_s=6.0)
    return {
        "cpu_ms": {kind: round(one.cpu_ms, 4) for kind, one in found.items()},
        "ratio": {kind: round(one.cpu_ratio, 4) for kind, one in found.items()},
    }


def accuracy(sessions: dict[str, Any], row: Case) -> dict[str, Any]:
    def run(session: Any, sample: Any) -> torch.Tensor:
        return torch.from_numpy(session.run(feeds(session, sample))[0])

    reference = run(sessions["float"], row.sample)
    found: dict[str, Any] = {
        "sqnr_db": {
            kind: round(sqnr_db(reference, run(session, row.sample)), 2)
            for kind, session in sessions.items()
            if kind != "float"
        }
    }
    if row.score is not None:
        found["score"] = {kind: row.score(partial(run, session)) for kind, session in sessions.items()}
    return found


def feeds(session: Any, sample: Any) -> dict[str, Any]:
    tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
    if isinstance(sample, dict) and set(session.inputs) == set(sample):
        tensors = [sample[name] for name in session.inputs]
    return {name: tensor.numpy() for name, tensor in zip(session.inputs, tensors, strict=True)}


def by_onnx(row: Case, file: Path) -> dict[str, Any]:
    """The accuracy of the ONNX file of the same model."""
    qmodel = sparsebit.quantize(row.model, row.calibration, "onnxruntime")
    qmodel.export(file, row.sample)
    session = sparsebit.open_session(file, num_threads=1)
    assert row.score is not None
    return {"onnx_score": row.score(lambda sample: torch.from_numpy(session.run(feeds(session, sample))[0]))}


def by_torchao(row: Case, file: Path) -> dict[str, Any]:
    """The same calibration with torchao's XNNPACK quantizer, per channel, as ExecuTorch's guide has it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    args, kwargs = as_call(row.sample, row.model)
    program = torch.export.export(row.model, args, kwargs)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(program.module(), quantizer)
    for batch in row.calibration:
        for place in range(len(pytree.tree_leaves(batch)[0])):
            one = pytree.tree_map(lambda x, at=place: x[at : at + 1], batch)
            one_args, one_kwargs = as_call(one, row.model)
            prepared(*one_args, **one_kwargs)
    made = torch.export.export(convert_pt2e(prepared), args, kwargs)
    lowered = to_edge_transform_and_lower(made, partitioner=[XnnpackPartitioner()])
    inside = outside = 0
    for node in lowered.exported_program().graph.nodes:
        part = getattr(lowered.exported_program().graph_module, str(node.args[0]), None) if node.args else None
        if part is not None and hasattr(part, "original_module"):
            inside += sum(one.op == "call_function" for one in part.original_module.graph.nodes)
        elif node.op == "call_function" and "getitem" not in str(node.target):
            outside += 1
    with file.open("wb") as handle:
        lowered.to_executorch().write_to_file(handle)
    return {"torchao_delegated": inside / max(1, inside + outside)}


def guarded(step: Callable[[], dict[str, Any]], key: str) -> dict[str, Any]:
    try:
        return step()
    except Exception as error:
        return {key: "".join(traceback.format_exception_only(error)).strip()[:300]}


def finished(file: Path | None, target: str) -> set[str]:
    """The models that the file has rows of, so that a run that was stopped continues."""
    if file is None or not file.is_file():
        return set()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["model"] for row in rows if row.get("target", target) == target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="resnet20,mobilenetv2,vit,efficientnet_lite0,minilm")
    parser.add_argument("--target", default="executorch", choices=sorted(TARGETS))
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--calibration", type=int, default=256, help="samples, at most")
    parser.add_argument("--peers", default="torchao,onnx", help="what is measured too; empty: nothing")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    done = finished(asked.json, asked.target)
    for name in asked.only.split(","):
        if name in done:
            continue
        found = guarded(partial(examine, name, asked), "error")
        emit({"benchmark": "programs", "model": name, "target": asked.target, **found}, asked.json)


if __name__ == "__main__":
    main()
