"""Recorded blocks compute what checkpointed blocks compute; without a GPU a recording runs its function again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")

from sparsebit.llm.finetuning.layers.packed_lora import add_adapter
from sparsebit.llm.finetuning.layers.recorded_blocks import record_blocks
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.quant_linear import QuantLinear

SHAPE = (2, 12)


def adapted_model(device: torch.device, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Two blocks with packed layers and adapters that are not zero, checkpointed."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **sizes, **heads, **config), dtype=dtype
    )
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and ".layers." in name:
            codes = torch.randint(0, 16, part.weight.shape)
            scales = torch.full((part.out_features, part.in_features // 128), 0.02).to(dtype)
            layer = QuantLinear(PackedWeight.from_codes(codes, scales, None, 4)).to(device)
            layer.prepare(dtype)
            model.set_submodule(name, layer)
    model = add_adapter(model.to(device), rank=4).get_base_model()
    with torch.no_grad():
        for parameter in trained(model):
            parameter.add_(torch.randn(parameter.shape).to(device) * 0.05)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def losses_and_gradients(model: Any, batches: list[dict[str, Tensor]], rate: float = 0.1) -> Iterator[list[Tensor]]:
    """Of each batch, with a step of gradient descent behind it."""
    for batch in batches:
        loss = model(**batch, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        yield [loss.detach(), *(parameter.grad.clone() for parameter in trained(model))]
        with torch.no_grad():
            for parameter in trained(model):
                parameter -= rate * parameter.grad
                parameter.grad = None


def batches_of(device: torch.device) -> list[dict[str, Tensor]]:
    """Rows of one length, two packed samples in some of them, and rows of another length."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (2, size), generator=generator).to(device) for size in (12, 12, 12, 9, 12, 12, 12)]
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12).to(device)
    found = [{"input_ids": one} for one in tokens]
    for place in (1, 4, 6):
        found[place]["position_ids"] = packed
    return found


def test_recordings_have_the_gradients_of_checkpoints_and_see_the_optimizer() -> None:
    device = torch.device("cpu")
    plain, recorded = adapted_model(device), adapted_model(device)
    recorder = record_blocks(recorded, SHAPE, device)
    assert recorder is not None
    expected = list(losses_and_gradients(plain, batches_of(device)))
    found = list(losses_and_gradients(recorded, batches_of(device)))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert recorder.num_replays == 2 * 6  # one of 7 batches has another length


def test_two_backwards_add_up() -> None:
    device = torch.device("cpu")
    plain, recorded = adapted_model(device), adapted_model(device)
    recorder = record_blocks(recorded, SHAPE, device)
    for model in (plain, recorded):
        for batch in [batches_of(device)[0]] * 3:
            model(**batch, use_cache=False).logits.float().logsumexp(-1).mean().backward()
    assert recorder is not None
    assert recorder.num_replays == 6
    for ours, theirs in zip(trained(recorded), trained(plain), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_random_numbers_are_not_recorded() -> None:
    device = torch.device("cpu")
    for settings in ({"attention_dropout": 0.1}, {"router_jitter_noise": 0.01}, {"parts": {"attn_pdrop": 0.1}}):
        assert record_blocks(adapted_model(device, **settings), SHAPE, device) is None, settings
    unknown = adapted_model(device)
    unknown.config.model_type = "mine"
    assert record_blocks(unknown, SHAPE, device) is None


def test_a_block_with_a_hook_is_computed_as_before() -> None:
    device = torch.device("cpu")
    model = adapted_model(device)
    recorder = record_blocks(model, SHAPE, device)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    for batch in [batches_of(device)[0]] * 3:
        model(**batch, use_cache=False).logits.sum().backward()
    assert recorder is not None
    assert recorder.num_replays == 3  # of the other block
    assert len(calls) == 3  # the second forward of a checkpoint stops in front of it


def test_what_answers_otherwise_is_computed_as_before(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    model = adapted_model(device)
    recorder = record_blocks(model, SHAPE, device)
    block = model.model.layers[0]
    forward = block.forward
    block.forward = lambda *args, **kwargs: (forward(*args, **kwargs),)
    model.model.layers[1].forward = lambda hidden, **_: hidden[0] if isinstance(hidden, tuple) else hidden
    with caplog.at_level("INFO"):
        for batch in [batches_of(device)[0]] * 3:
            model(**batch, use_cache=False).logits.sum().backward()
    assert recorder is not None
    assert recorder.num_replays == 0
    assert "not recorded" in caplog.text


@pytest.mark.gpu
def test_cuda_graphs_have_the_gradients_of_checkpoints() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", 0)
    plain, recorded = (adapted_model(device, torch.bfloat16) for _ in range(2))
    recorder = record_blocks(recorded, SHAPE, device)
    assert recorder is not None
    expected = list(losses_and_gradients(plain, batches_of(device), rate=0.0))
    found = list(losses_and_gradients(recorded, batches_of(device), rate=0.0))
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).norm() <= 0.03 * other.norm()
    assert recorder.num_replays == 2 * 6
