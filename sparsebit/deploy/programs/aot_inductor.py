"""A program as a `.pt2` package of AOTInductor: C++ code and a library that torch loads without any of ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from sparsebit.deploy.exporting.export_errors import quiet, refused_as
from sparsebit.deploy.programs.integer_linear import lay_out_linears
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.sessions.program_facts import KEY, ProgramFacts
from sparsebit.errors import DeploymentError
from sparsebit.records.audit import LayerRun

_ATEN = torch.ops.aten
_HEAVY: dict[Any, str] = {
    _ATEN._int_mm.default: "linear layer",
    _ATEN.linear.default: "linear layer",
    **dict.fromkeys((_ATEN.conv2d.default, _ATEN.conv1d.default, _ATEN.convolution.default), "convolution"),
    **dict.fromkeys((_ATEN.matmul.default, _ATEN.bmm.default), "matrix product"),
    _ATEN.scaled_dot_product_attention.default: "matrix product",
}
_BY_DESIGN = "by design: AOTInductor has integer kernels for linear layers alone"


def write_pt2(program: ExportedProgram, facts: ProgramFacts, path: Path) -> None:
    """Compile the program and write it; its facts are metadata of the package."""
    check_compiler()
    stored = replace(facts, layers=tuple(_layers(program))).to_json()
    settings = {"cpp.dynamic_threads": True, "aot_inductor.metadata": {KEY: stored}}
    with refused_as("AOTInductor does not compile the program"), quiet(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)


def check_compiler() -> None:
    """Raise, before any work, if there is no C++ compiler."""
    given = os.environ.get("CXX")
    names = [given] if given else ["g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise DeploymentError(
            f"a .pt2 package is compiled with a C++ compiler, and none of {', '.join(names)} is on the PATH; install "
            "g++, or name a compiler in the variable CXX"
        )


def _layers(program: ExportedProgram) -> Iterator[LayerRun]:
    names = {**program.graph_signature.inputs_to_buffers, **program.graph_signature.inputs_to_parameters}
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in _HEAVY:
            continue
        kind, is_integer = _HEAVY[node.target], node.target is _ATEN._int_mm.default
        op = str(node.target).split(".")[1]
        stored = _stored_name(node, names)
        is_packed = not is_integer and stored.endswith("weight_codes")
        cause = "" if is_integer or is_packed else "it is not quantized" if kind == "linear layer" else _BY_DESIGN
        yield LayerRun(
            *(stored.removesuffix("_weight_codes").removesuffix(".weight") or node.name, op, kind, True),
            "integer" if is_integer else "weight-only" if is_packed else "float",
            "_int_mm" if is_integer else "inductor",
            cause,
            on_purpose=cause == _BY_DESIGN,
            shape=tuple(size if isinstance(size, int) else 0 for size in node.meta["val"].shape),
        )


def _stored_name(node: fx.Node, names: dict[str, str]) -> str:
    """The name of the stored tensor that is the node's weight; empty for a product of two activations."""
    source = node.all_input_nodes[1] if node.all_input_nodes[1:] else None
    while source is not None and source.op == "call_function" and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return names.get(source.name, "") if source is not None else ""


AOT_INDUCTOR = ProgramTarget("aot_inductor", ".pt2", write_pt2, lay_out=lay_out_linears, check=check_compiler)
