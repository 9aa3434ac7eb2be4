"""q, k and v, and gate and up, in one product: the same outputs, names and files as apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.llm import QuantLinear, load, resident_bytes
from sparsebit.llm.layers import cpu_probe
from sparsebit.llm.layers.cpu_probe import CpuProbe
from sparsebit.llm.layers.kernel_layouts import FRAGMENTS, INT4PACK, LAYOUTS, Prepared
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.quant_linear import ParallelGroup, join_parallel_layers, separate_parallel_layers
from tests.llm.tiny_models import tiny_model

WIDTH = 128
Changes = dict[str, dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel for GPUs, by its definition in plain torch, on the CPU; its calls by the number of outputs."""
    counted: list[int] = []

    def product(x: Tensor, weight: Prepared) -> Tensor:
        counted.append(weight.out_features)
        return FRAGMENTS.product(x, weight)

    layout = replace(FRAGMENTS, refusal=lambda *_: None, product=product)
    monkeypatch.setitem(LAYOUTS, layout.name, layout)
    monkeypatch.setattr(cpu_probe, "_probe", lambda *_: CpuProbe(layout, {}, {}))
    return counted


def packed_layer(layer: nn.Linear, *, bits: int = 4, group: int = 64, symmetric: bool = True) -> QuantLinear:
    codes = torch.randint(0, 1 << bits, layer.weight.shape)
    scales = torch.rand(len(codes), codes.shape[1] // group).add_(0.5).mul_(0.01).bfloat16()
    zeros = None if symmetric else torch.randint(0, 1 << bits, scales.shape)
    bias = None if layer.bias is None else layer.bias.detach()
    found = QuantLinear(PackedWeight.from_codes(codes, scales, zeros, bits), bias)
    found.prepare(torch.bfloat16)
    return found


def packed_model(
    model_type: str = "llama", changes: Changes | None = None, *, head_dim: int = 32, **layout: Any
) -> Any:
    """`changes`: other formats, by the end of a layer's name."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": head_dim}
    model = tiny_model(model_type, **sizes).bfloat16()
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and name != "lm_head":
            other = next((value for end, value in (changes or {}).items() if name.endswith(end)), {})
            model.set_submodule(name, packed_layer(part, **{**layout, **other}))
    return model


def tokens() -> Tensor:
    return torch.arange(3, 8)[None]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(tokens(), use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("llama", {}),
        ("llama", {"symmetric": False}),
        ("llama", {"bits": 3, "symmetric": False}),
        ("qwen2", {"bits": 2}),  # with biases
        ("phi", {"bits": 8}),
    ],
    ids=str,
)
def test_the_same_outputs_in_fewer_products(model_type: str, layout: dict[str, Any], calls: list[int]) -> None:
    model = packed_model(model_type, **layout)
    apart, size = logits(model), resident_bytes(model)
    num_apart = len(calls)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    num_groups = join_parallel_layers(model)
    assert num_groups == (2 if model_type == "phi" else 4)
    calls.clear()
    assert torch.equal(logits(model), apart)
    assert len(calls) == num_apart - (4 if model_type == "phi" else 6)
    assert resident_bytes(model) == size
    joined = model.state_dict()
    assert list(joined) == list(state) and all(torch.equal(joined[name], value) for name, value in state.items())
    separate_parallel_layers(model)
    calls.clear()
    assert torch.equal(logits(model), apart) and len(calls) == num_apart
    assert all(one.parallel is None for one in model.modules() if isinstance(one, QuantLinear))


@pytest.mark.parametrize(
    ("changes", "num_groups"),
    [
        ({"v_proj": {"bits": 3}}, 2),
        ({"up_proj": {"group": 32}}, 2),
        ({"k_proj": {"symmetric": False}, "gate_proj": {"bits": 8}}, 0),
    ],
    ids=["bits", "groups", "zero points"],
)
def test_other_formats_stay_apart(changes: Changes, num_groups: int, calls: list[int]) -> None:
    model = packed_model(changes=changes)
    apart = logits(model)
    assert join_parallel_layers(model) == num_groups
    assert torch.equal(logits(model), apart)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("head_dim", [32, 16])
def test_the_kernel_for_cpus_joins_whole_blocks_of_outputs(
    head_dim: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_probe, "_probe", lambda *_: CpuProbe(INT4PACK, {}, {}))
    model = packed_model(symmetric=symmetric, head_dim=head_dim).float()
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    for layer in layers:
        layer.prepare(torch.float32, "bfloat16")
    assert {layer.path for layer in layers} == {"int4pack"}
    apart, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    assert join_parallel_layers(model) == (4 if head_dim == 32 else 2)  # k and v of 32 outputs stay apart
    assert torch.equal(logits(model), apart)
    with torch.inference_mode():  # each computes its own product there
        assert torch.equal(model(tokens(), use_cache=False).logits, apart)
    joined = model.state_dict()
    assert all(torch.equal(joined[name], value) for name, value in state.items())


def test_layers_without_a_kernel_and_float_layers_stay_apart() -> None:
    model = packed_model()  # no kernel for fragments here
    assert model.model.layers[0].mlp.up_proj.path == "unpacked"
    assert join_parallel_layers(model) == 0
    assert join_parallel_layers(tiny_model("llama")) == 0
    assert join_parallel_layers(nn.Linear(2, 2)) == 0


@pytest.fixture
def trio(calls: list[int]) -> list[QuantLinear]:
    """q, k and v of a joined model."""
    model = packed_model()
    join_parallel_layers(model)
    calls.clear()
    attention = model.model.layers[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def alone(layer: QuantLinear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.packed.dequantize(torch.bfloat16))


def test_any_order_twice_and_one_alone(trio: list[QuantLinear], calls: list[int]) -> None:
    x, other = torch.randn(2, 3, WIDTH).bfloat16(), torch.randn(1, WIDTH).bfloat16()
    with torch.no_grad():
        for number in (2, 0, 0, 1, 1):
            assert torch.equal(trio[number](x), alone(trio[number], x))
        assert torch.equal(trio[1](other), alone(trio[1], other))
        assert torch.equal(trio[2](x), alone(trio[2], x))
    assert trio[0](torch.empty(0, WIDTH).bfloat16()).shape == (0, trio[0].out_features)


def test_an_input_that_was_written_to_is_another(trio: list[QuantLinear], calls: list[int]) -> None:
    x = torch.randn(3, WIDTH).bfloat16()
    with torch.no_grad():
        trio[0](x)
        x.mul_(2)
        assert torch.equal(trio[1](x), alone(trio[1], x))
    assert len(calls) == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_a_hook_that_changes_the_input_of_one(trio: list[QuantLinear], in_place: bool, compiled: bool) -> None:
    def change(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].add_(1) if in_place else args[0] + 1,)

    def run(x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in trio]

    trio[1].register_forward_pre_hook(change)
    x = torch.randn(3, WIDTH).bfloat16()
    given = x.clone(), x + 1, x + 1 if in_place else x.clone()
    torch._dynamo.reset()
    with torch.no_grad():
        found = (torch.compile(run, backend="aot_eager") if compiled else run)(x)
    for layer, y, its_input in zip(trio, found, given, strict=True):
        assert torch.equal(y, alone(layer, its_input))


def test_in_inference_mode_each_computes_its_own(trio: list[QuantLinear], calls: list[int]) -> None:
    with torch.inference_mode():
        x = torch.randn(3, WIDTH).bfloat16()
        trio[0](x)
        x.add_(1)
        found = [layer(x) for layer in trio]
        assert all(torch.equal(y, alone(layer, x)) for layer, y in zip(trio, found, strict=True))
    assert calls == [layer.out_features for layer in (trio[0], *trio)]


def test_gradients(trio: list[QuantLinear]) -> None:
    x = torch.randn(3, WIDTH).bfloat16().requires_grad_()
    sum(layer(x).sum() for layer in trio).backward()  # type: ignore[union-attr]
    expected = sum(layer.packed.dequantize(torch.float32).sum(0) for layer in trio)
    assert x.grad is not None and torch.allclose(x.grad[1].float(), expected, atol=0.02)


def test_nothing_is_kept_when_all_have_their_outputs(trio: list[QuantLinear]) -> None:
    x = torch.randn(3, WIDTH).bfloat16()
    with torch.no_grad():
        for layer in trio:
            layer(x)
    group = trio[0].parallel
    assert isinstance(group, ParallelGroup) and group._whole is not None and group._answer is None


@pytest.mark.parametrize("change", [lambda model: model.to("cpu"), lambda model: model.half()], ids=["device", "type"])
def test_a_model_that_is_moved_or_cast_is_joined_again(change: Callable[[Any], Any], calls: list[int]) -> None:
    model = packed_model()
    join_parallel_layers(model)
    expected = logits(change(copy.deepcopy(model)))
    change(model)
    calls.clear()
    assert torch.equal(logits(model), expected)
    assert len(calls) == 8
    separate_parallel_layers(model)
    assert torch.equal(logits(model), expected)


def test_a_copy_and_a_loaded_state_have_their_own_weights(calls: list[int]) -> None:
    model, other = packed_model(), packed_model(bits=4)
    join_parallel_layers(model)
    before, expected = logits(model), logits(other)
    twin = copy.deepcopy(model)
    twin.load_state_dict(other.state_dict())
    calls.clear()
    assert torch.equal(logits(twin), expected) and len(calls) == 8
    assert torch.equal(logits(model), before)


@pytest.mark.slow
def test_compiled(calls: list[int]) -> None:
    model = packed_model()
    expected = logits(model)
    join_parallel_layers(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    calls.clear()
    with torch.no_grad():
        assert torch.equal(compiled(tokens(), use_cache=False).logits, expected)
        traced = len(calls)
        assert torch.equal(compiled(tokens() + 1, use_cache=False).logits, model(tokens() + 1, use_cache=False).logits)
    assert traced == 8


@pytest.mark.parametrize("join_layers", [False, True])
def test_load_joins_only_where_asked(join_layers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []

    def join(model: nn.Module) -> int:
        asked.append(model)
        return 0

    monkeypatch.setattr("sparsebit.llm.running.loading.join_parallel_layers", join)
    tiny_model("llama").save_pretrained(tmp_path)
    load(tmp_path, join_layers=join_layers)
    assert len(asked) == join_layers
