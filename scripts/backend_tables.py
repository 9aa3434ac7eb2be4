"""Writes the tables of the pages on backends, runtimes and ONNX files out of the code.

The profiles of `deploy/runtimes.py`, the number types of `deploy/onnx_graph/number_types.py`, the rules of
`deploy/audit/tensorrt_rules.py`. `python scripts/backend_tables.py` writes the pages; with `--check` it writes
nothing and fails where one is out of step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from marked_sections import table, update

from sparsebit.deploy.audit.tensorrt_rules import RULES
from sparsebit.deploy.onnx_graph.number_types import ACTIVATION_WIDTHS, FLOAT8, Storage, storage_for
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile

DOCS = Path(__file__).resolve().parent.parent / "docs"

# What a rule asks for, in words; the rule itself knows only where it is broken.
ASKED = {
    "operators": "QDQ, no integer operators (`QLinearConv`, `MatMulInteger`, …)",
    "opset": "opset 10 to 25; 13 or more for scales per channel, 19 or more for 8-bit floats",
    "types": "`int8`, `int4`, `float8e4m3fn` or `float4e2m1`",
    "zero-points": "zero point 0",
    "scales": "every scale a positive constant: float, float16 or bfloat16",
    "activation-scales": "one scale per activation tensor",
    "activation-bits": "no `int4` activations",
    "bias": "no DequantizeLinear on `int32`",
    "channel-axis": "scales per channel along the weight's output channels, one for each",
    "blocks": "blocks for 4-bit weights only, of a size that divides the weight; an even number of 4-bit elements",
    "pairs": "a DequantizeLinear behind every QuantizeLinear, and nothing else",
    "both-operands": "input and weight quantized to the same type, or neither",
    "weight-next-to-layer": "nothing between a weight's DequantizeLinear and its layer",
    "batch-norm": "no batch norm behind a quantized layer",
    "activation-fusion": "no Q/DQ between a layer and its activation",
    "concat-scales": "one scale for all inputs of a concat",
    "residual-add": "a quantized skip connection where convolutions are quantized",
}


def placement() -> str:
    head = (
        *("backend", "inputs", "only behind a convolution", "outputs", "absorbs"),
        *("as two integer ops", "batch norms folded by default"),
    )
    return table(head, map(_placement, PROFILES.values()))


def recommended() -> str:
    rows = ((_code([profile.name]), *_config(profile)) for profile in PROFILES.values())
    return table(("backend", "weights", "activations", "FUSE_BN"), rows)


def costs() -> str:
    head = ("backend", "key that you write", "cost")
    rows = [
        (_code([profile.name]), _yaml(setting), cost)
        for profile in PROFILES.values()
        for setting, cost in profile.costs.items()
    ]
    return table(head, rows)


def files() -> str:
    """How each backend's file is written, and what runs it here."""
    head = ("backend", "bias", "int8 weights", "opset", "checked in")
    rows = [
        (_code([profile.name]), profile.bias, _range(profile), _format(profile), _checked_in(profile))
        for profile in PROFILES.values()
    ]
    return table(head, rows)


def one_profile(name: str) -> str:
    """All of a runtime's profile, for its own page."""
    profile = PROFILES[name]
    rows = [
        ("inputs quantized", _code((profile.inputs or frozenset()) - profile.conv_fed)),
        ("inputs quantized only behind a convolution", _code(profile.conv_fed)),
        ("outputs quantized", _code(profile.outputs)),
        ("activations absorbed by the layer in front", _code(profile.absorbs)),
        ("activations run as two integer ops", _code(profile.gates)),
        ("weights", f"{profile.weight_scheme}, int8 codes {_range(profile)}"),
        ("activations", f"{profile.activation_scheme}, {_activation_type(profile)}"),
        ("bias", profile.bias),
        ("batch norms", "folded" if profile.folds_batchnorm else "kept"),
        ("opset", _format(profile)),
        ("checked in", _checked_in(profile)),
    ]
    return table(("", f"`{name}`"), rows)


def types() -> str:
    """Bits -> the ONNX type that holds them, for weights (of `virtual`, which has them all) and activations."""
    widths = PROFILES["virtual"].weight_widths
    stored = [(bits, *(_storage(bits, kinds) for kinds in (widths, ACTIVATION_WIDTHS))) for bits in range(1, 17)]
    rows = []
    for (weight, activation), same in groupby(stored, key=lambda row: row[1:]):
        bits = [str(row[0]) for row in same]
        span = bits[0] if len(bits) == 1 else f"{bits[0]} to {bits[-1]}"
        rows.append((span, _pair(weight), _pair(activation), str(max(weight.opset, activation.opset))))
    rows.append(("fp8", f"`{FLOAT8.name.lower()}`", "none", str(FLOAT8.opset)))
    return table(("bits", "weights", "activations", "first opset"), rows)


def rules() -> str:
    head = ("rule", "severity", "asks for", "what to do", "source")
    rows = [(f"`{rule.name}`", rule.severity, ASKED[rule.name], rule.remedy, rule.source) for rule in RULES]
    return table(head, rows)


def _placement(profile: RuntimeProfile) -> tuple[str, ...]:
    is_virtual = profile.inputs is None
    return (
        _code([profile.name]),
        "every known op" if profile.inputs is None else _code(profile.inputs),
        _code(profile.conv_fed),
        _code(profile.outputs),
        "every activation" if is_virtual else _code(profile.absorbs),
        _code(profile.gates),
        "yes" if profile.folds_batchnorm else "no",
    )


def _config(profile: RuntimeProfile) -> tuple[str, str, str]:
    config = profile.recommended()
    parts = [config["W"], config["A"], config["SCHEDULE"]]
    weights, activations, schedule = (part if isinstance(part, dict) else {} for part in parts)
    formats = [f"{part['QUANTIZER']['BIT']} bits, {part['QSCHEME']}" for part in (weights, activations)]
    return formats[0], formats[1], str(schedule["FUSE_BN"]).lower()


def _range(profile: RuntimeProfile) -> str:
    return f"{-127 if profile.narrow_weights else -128} to 127"


def _activation_type(profile: RuntimeProfile) -> str:
    return "int8" if profile.activation_scheme.endswith("-symmetric") else "uint8"


def _format(profile: RuntimeProfile) -> str:
    """The opset of its files; of programs, which have none, the ending."""
    return str(profile.opset) if profile.ending == ".onnx" else f"none: a `{profile.ending}` program"


def _checked_in(profile: RuntimeProfile) -> str:
    if profile.executes is None and profile.ending != ".onnx":
        return "not checked: no runtime for it runs on Linux"
    return profile.executes or "onnxruntime, node by node"


def _storage(bits: int, widths: frozenset[int]) -> Storage:
    return storage_for(0, (1 << bits) - 1, widths, "")


def _pair(storage: Storage) -> str:
    """Signed where symmetric, unsigned where affine."""
    return f"`int{storage.width}`, `uint{storage.width}`"


def _yaml(setting: str) -> str:
    """`A.QADD.ENABLE_QUANT=False` as it stands in a config file."""
    key, _, value = setting.partition("=")
    return f"`{key}: {value.lower()}`"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    pages = {
        "reference/backends": {
            "placement": placement(),
            "recommended": recommended(),
            "costs": costs(),
            "files": files(),
        },
        "reference/onnx-files": {"types": types()},
        "reference/onnxruntime": {"profile": one_profile("onnxruntime")},
        **{
            f"guides/{name.replace('_', '-')}": {"profile": one_profile(name)}
            for name in ("openvino", "tensorrt", "qnn", "executorch", "aot_inductor", "litert", "coreml")
        },
    }
    pages["guides/tensorrt"]["rules"] = rules()
    return max(update(DOCS / f"{name}.md", sections, check=check) for name, sections in pages.items())


if __name__ == "__main__":
    sys.exit(main())
