"""The product of a packed layer with its adapter in one step of autograd, against the same in separate operators."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sparsebit.llm.finetuning.layers.adapted_product import adapted_product
from sparsebit.llm.layers import packed_weight
from sparsebit.llm.layers.kernel_layouts import FRAGMENTS
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.quant_linear import QuantLinear

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

    from sparsebit.llm.finetuning.layers.packed_lora import lora_class

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


def gradients_of(one: Any, x: Tensor, y: Tensor, *, autocast: bool = False) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        leaves = x, one.lora_A["default"].weight, one.lora_B["default"].weight
        return list(torch.autograd.grad(y.square().sum(), leaves))


@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["one step", "separate"])
def test_a_backward_under_autocast_is_that_without(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weight, "_BLOCK_ELEMENTS", 10 * 64)  # of several blocks, which are added up
    one, x = adapted(dropout).eval(), tensors()["x"]
    plain, cast = gradients_of(one, x, one(x)), gradients_of(one, x, one(x), autocast=True)
    far = 1e-6 if not dropout else 1e-2  # torch's own operators are cast
    for ours, theirs in zip(cast, plain, strict=True):
        assert float((ours - theirs).norm()) <= far * float(theirs.norm())


def test_selective_checkpointing_may_keep_the_product() -> None:
    one, x = adapted(), torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    y = checkpoint(one, x, use_reentrant=False, context_fn=contexts)
    for ours, theirs in zip(gradients_of(one, x, y), gradients_of(one, x, one(x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo makes an instance of a Function
def test_a_compiled_step_is_one_graph() -> None:
    one, x = adapted(), tensors()["x"]
    y = torch.compile(one, fullgraph=True, backend="aot_eager")(x)
    for ours, theirs in zip(gradients_of(one, x, y), gradients_of(one, x, one(x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_adapter_is_pickled() -> None:
    one, x = adapted(), tensors()["x"]
    assert torch.equal(pickle.loads(pickle.dumps(one))(x), one(x))


def test_each_element_of_a_batch_takes_its_own_adapter() -> None:
    from peft import LoraConfig

    one, x = adapted().eval(), tensors()["x"].detach()
    one.update_layer("other", 2, lora_alpha=2, config=LoraConfig(r=2))
    nn.init.normal_(one.lora_B["other"].weight)
    with torch.no_grad():
        found = one(x, adapter_names=["other", "__base__"])
        one.set_adapter("other")
        torch.testing.assert_close(found[0], one(x)[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], one.base_layer(x)[1])
        with pytest.raises(ValueError, match="adapter_names"):
            one(x, adapter_names=["other"])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_under_autocast_is_as_exact_as_a_float_one(bits: int) -> None:
    """For few rows a float32 product is the difference of two sums, which must not be rounded to 16 bits."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (24, 64), dtype=torch.uint8, generator=generator)
    one = QuantLinear(PackedWeight.from_codes(codes, torch.full((24, 1), 0.1), None, bits))
    x, dense = torch.randn(4, 64, generator=generator) + 1, one.packed.dequantize(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, floats = one(x), F.linear(x, dense)
    assert found.dtype == floats.dtype == torch.bfloat16
    torch.testing.assert_close(found, floats, rtol=1e-2, atol=1e-2 * float(floats.abs().max()))
