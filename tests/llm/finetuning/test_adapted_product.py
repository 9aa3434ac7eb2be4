"""The product of a packed layer with its adapter in one step of autograd, against the same in separate operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsebit.llm.finetuning.adapted_product import adapted_product
from sparsebit.llm.kernel_layouts import FRAGMENTS
from sparsebit.llm.packed_weight import PackedWeight
from sparsebit.llm.quant_linear import QuantLinear

pytest.importorskip("peft")


def layer(*, bias: bool = False, inputs: int = 64, outputs: int = 24) -> QuantLinear:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, inputs // 32, generator=generator) / 16
    packed = PackedWeight.from_codes(codes, scales, None, 4)
    return QuantLinear(packed, torch.randn(outputs, generator=generator) if bias else None)


def tensors(frozen: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (2, 3, 64), "down": (4, 64), "up": (24, 4)}
    return {
        name: torch.randn(shape, generator=generator).requires_grad_(name != frozen) for name, shape in shapes.items()
    }


def separate(one: QuantLinear, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    y: Tensor = one(x) + F.linear(F.linear(x, down), up) * scaling
    return y


def results(compute: Any, one: QuantLinear, frozen: str) -> list[Tensor | None]:
    given = tensors(frozen)
    y = compute(one, *given.values(), 0.5)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), *(value.grad for value in given.values())]


@pytest.mark.parametrize("frozen", ["", "x", "down", "up"])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_separate_operators(bias: bool, frozen: str) -> None:
    one = layer(bias=bias)
    for ours, theirs in zip(results(adapted_product, one, frozen), results(separate, one, frozen), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_float32_adapters_get_float32_gradients_from_half_inputs() -> None:
    given = tensors()
    x = given["x"].detach().bfloat16().requires_grad_()
    y = adapted_product(layer(), x, given["down"], given["up"], 1.0)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert given["down"].grad.dtype == given["up"].grad.dtype == torch.float32  # type: ignore[union-attr]


def adapted(dropout: float = 0.0) -> Any:
    from peft import LoraConfig

    from sparsebit.llm.finetuning.packed_lora import lora_class

    torch.manual_seed(0)
    found = lora_class()(layer(), "default", LoraConfig(r=4, lora_dropout=dropout), r=4, lora_alpha=8)
    nn.init.normal_(found.lora_B["default"].weight)
    return found


def has_one_node(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_AdaptedProductBackward"


def test_an_adapter_takes_one_step_in_training_alone() -> None:
    one, x = adapted(), tensors()["x"]
    y = one(x)
    assert has_one_node(y)
    with torch.no_grad():
        assert one(x).grad_fn is None
    down, up = one.lora_A["default"].weight, one.lora_B["default"].weight
    torch.testing.assert_close(y, separate(one.base_layer, x, down, up, 2.0), rtol=1e-5, atol=1e-4)


def test_dropout_and_hooks_of_the_layer_keep_the_separate_operators() -> None:
    x = tensors()["x"]
    assert not has_one_node(adapted(dropout=0.1)(x))
    one, calls = adapted(), []
    one.base_layer.register_forward_hook(lambda *_: calls.append("base"))
    assert not has_one_node(one(x))
    assert calls == ["base"]


def test_a_checkpointed_block_unpacks_its_weight_twice_and_not_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layout of GPUs, which computes its plain definition on a CPU."""
    monkeypatch.setattr(QuantLinear, "_choice", lambda *_: (FRAGMENTS, ""))
    one = layer(bias=True, inputs=128, outputs=128)
    one.prepare(torch.bfloat16)
    calls = []
    original = QuantLinear.dense_weight
    monkeypatch.setattr(QuantLinear, "dense_weight", lambda *given: calls.append(1) or original(*given))
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (3, 128), "down": (4, 128), "up": (128, 4)}

    def gradients(compute: Any) -> list[Tensor]:
        given = [torch.randn(shape, generator=generator.manual_seed(1)) for shape in shapes.values()]
        x, down, up = given[0].bfloat16().requires_grad_(), given[1].requires_grad_(), given[2].requires_grad_()
        compute(x, down, up).float().square().sum().backward()
        return [leaf.grad for leaf in (x, down, up) if leaf.grad is not None]

    plain = gradients(lambda x, down, up: adapted_product(one, x, down, up, 0.5))
    assert len(calls) == 1
    again = gradients(lambda x, down, up: checkpoint(adapted_product, one, x, down, up, 0.5, use_reentrant=False))
    assert len(calls) == 1 + 2
    assert len(plain) == len(again) == 3
    for ours, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))
