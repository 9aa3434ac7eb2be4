"""The grammar: how a random net is put together, and with which numbers it is filled."""

from __future__ import annotations

from collections.abc import Callable

from tests.differential.layers import STATEMENTS, convolution, linear, residual, transposed
from tests.differential.net import Net
from tests.fuzz.choices import Choices
from tests.fuzz.program import ModuleClass, Variable
from tests.fuzz.scope import Names, Scope

SHAPES = ((2, 3, 7, 9), (2, 4, 6, 6), (2, 8, 5, 5), (1, 3, 8, 8), (2, 5, 8), (3, 6), (2, 4, 11), (2, 1, 5, 7))
# Ties, ends of the range, outliers, constants, tiny and huge numbers.
DATA: tuple[tuple[str, ...], ...] = (
    (),
    (),
    (),
    ("x = x.abs()",),
    ("x = -x.abs()",),
    ("x = 5 + x / 100",),
    ("x.view(-1)[3] = 1e4",),
    ("x.view(-1)[::7] *= 50",),
    ("x = (x * 4).round() / 4",),
    ("x = x * 1e-6",),
    ("x = x * 1e4",),
    ("x[0] = 0",),
)
WEIGHTS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    (),
    ("p.add_(torch.randn_like(p), alpha=0.1)",),
    ("p.view(-1)[0] = 3",),
    ("p[0] *= 1e-7",),
    ("p[-1] *= 100",),
    ("p[0] = 0",),
    ("p.abs_()",),
    ("p.copy_((p * 8).round() / 8)",),
    ("p.mul_(1 if p.ndim > 1 else 50)",),
    ("p.mul_(4)",),
)
BACKENDS = (*["onnxruntime"] * 5, *["openvino"] * 3, *["virtual"] * 3, "tensorrt")
SCHEMES = ("per-channel-symmetric", "per-channel-symmetric", "per-tensor-symmetric", "per-channel-affine")
WEIGHT_SCHEMES = (*SCHEMES, "per-tensor-affine")
OBSERVERS = ("minmax", "minmax", "percentile", "mse", "moving_average")


def generate(choices: Choices) -> Net:
    """A random net; the same choices make the same one."""
    shape = choices.pick(SHAPES)
    scope = Scope(choices, Names(keeps_odd=False), variables=[Variable("x", shape)])
    table = [write for weight, write in STATEMENTS.values() for _ in range(weight)]
    choices.pick(table)(scope)
    choices.pick(layers_for(shape))(scope)  # a net without one has nothing to quantize
    for _ in range(choices.between(0, 3)):
        choices.pick(table)(scope)
    last = scope.variables[-1]
    other = choices.pick(scope.variables)
    result = f"{last.name}, {other.name}" if other.name not in ("x", last.name) and choices.chance(15) else last.name
    root = ModuleClass("Net", "self, x", tuple(scope.statements), result)
    return Net(
        root,
        (),
        shape=shape,
        data=choices.pick(DATA),
        weights=choices.pick(WEIGHTS),
        config=tuple(_config(choices, scope).items()),
        gain=choices.pick([1.0, 1.0, 1.0, 4.0, 0.1]),
        is_dynamic=choices.chance(12),
    )


def layers_for(shape: tuple[int, ...]) -> list[Callable[[Scope], bool]]:
    images = [convolution, convolution, convolution, residual, transposed, linear]
    return images if len(shape) == 4 else [convolution, linear] if len(shape) == 3 else [linear]


def _config(choices: Choices, scope: Scope) -> dict[str, object]:
    backend = choices.pick(BACKENDS)
    config: dict[str, object] = {"BACKEND": backend}
    if choices.chance(80):
        config["SCHEDULE.FUSE_BN"] = True
    if choices.chance(30) and backend != "tensorrt":
        config["W.QSCHEME"] = choices.pick(WEIGHT_SCHEMES)
    if choices.chance(20):
        config["A.QSCHEME"] = "per-tensor-symmetric"
    if choices.chance(40):
        config["A.OBSERVER.TYPE"] = choices.pick(OBSERVERS)
        if config["A.OBSERVER.TYPE"] == "percentile":
            config["A.OBSERVER.PERCENTILE.ALPHA"] = choices.pick([0.05, 0.001])
    if choices.chance(20):
        config["A.QADD.ENABLE_QUANT"] = choices.chance(70)
    config |= _bits(choices, backend)
    layers = [name.removeprefix("self.") for name, _, _ in scope.layers]
    if layers and choices.chance(25):
        off = [{choices.pick(layers): ["QUANTIZER.DISABLE", True]}]
        config |= {"W.SPECIFIC": off, "A.SPECIFIC": off}
    return config


def _bits(choices: Choices, backend: str) -> dict[str, object]:
    """Bits of weights and activations, and weights alone."""
    if choices.chance(12):  # float activations
        bits = choices.pick({"onnxruntime": [8, 4, 2], "virtual": [8, 4, 3, 2]}.get(backend, [8, 4]))
        return {"A.QUANTIZER.DISABLE": True, "W.QUANTIZER.BIT": bits}
    if backend != "virtual":
        return {}
    return {"W.QUANTIZER.BIT": choices.pick([8, 4, 2, 5, 16]), "A.QUANTIZER.BIT": choices.pick([8, 8, 6, 4, 16])}
