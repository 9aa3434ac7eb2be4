from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.passes.decompose import PlainMultiheadAttention, decompose

L, S, N, E, H = 5, 7, 3, 8, 2


def attention(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(E, H, **options).eval()
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module


def inputs(module: nn.MultiheadAttention, *, batched: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [(L, E), (S, module.kdim), (S, module.vdim)]
    if not batched:
        return tuple(torch.randn(length, width) for length, width in sizes)  # type: ignore[return-value]
    shapes = [(N, length, width) if module.batch_first else (length, N, width) for length, width in sizes]
    return tuple(torch.randn(shape) for shape in shapes)  # type: ignore[return-value]


OPTIONS = [
    {"batch_first": True},
    {"batch_first": False},
    {"bias": False},
    {"kdim": 6, "vdim": 4, "batch_first": True},
    {"kdim": 6, "bias": False},
]
HIDDEN = torch.rand(L, S) > 0.7
PADDING = torch.zeros(N, S, dtype=torch.bool).index_fill_(1, torch.tensor([S - 1]), True)
CALLS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"average_attn_weights": False},
    {"attn_mask": HIDDEN},
    {"attn_mask": torch.randn(L, S)},
    {"attn_mask": torch.rand(N * H, L, S) > 0.8},
    {"attn_mask": torch.randn(N * H, L, S), "need_weights": False},
    {"key_padding_mask": PADDING},
    {"key_padding_mask": torch.randn(N, S)},
    {"attn_mask": torch.randn(L, S), "key_padding_mask": torch.randn(N, S), "average_attn_weights": False},
    {"attn_mask": HIDDEN, "key_padding_mask": PADDING, "need_weights": False},
]


def shown(value: dict[str, Any]) -> str:
    parts = [f"{k}:{f'{v.dim()}d-{v.dtype}' if isinstance(v, Tensor) else v}" for k, v in value.items()]
    return "-".join(parts) or "plain"


@pytest.mark.parametrize("call", CALLS, ids=shown)
@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_the_same_function(options: dict[str, Any], call: dict[str, Any]) -> None:
    module = attention(**options)
    plain = PlainMultiheadAttention(module)
    tensors = inputs(module)
    torch.testing.assert_close(plain(*tensors, **call), module(*tensors, **call), equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched(batch_first: bool) -> None:
    module = attention(batch_first=batch_first)
    tensors = inputs(module, batched=False)
    call = {"key_padding_mask": PADDING[0], "attn_mask": HIDDEN}
    torch.testing.assert_close(PlainMultiheadAttention(module)(*tensors, **call), module(*tensors, **call))
    assert PlainMultiheadAttention(module)(*tensors)[1].shape == (L, S)


def test_dropout_in_train_mode() -> None:
    module = attention(dropout=0.5).train()
    plain = PlainMultiheadAttention(module)
    assert plain.training
    tensors = inputs(module)
    torch.manual_seed(0)
    expected = module(*tensors)
    torch.manual_seed(0)
    torch.testing.assert_close(plain(*tensors), expected)
    torch.testing.assert_close(plain.eval()(*tensors), module.eval()(*tensors))


def test_causal_hint_without_a_mask_is_refused_as_by_the_original() -> None:
    module = attention()
    for candidate in (module, PlainMultiheadAttention(module)):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            candidate(*inputs(module), is_causal=True)


def test_what_is_replaced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = attention()
            self.again = self.plain
            self.watched, self.extra = attention(), attention(add_bias_kv=True)
            self.tied, self.tied2 = attention(), attention()
            self.tied2.in_proj_weight = self.tied.in_proj_weight
            self.watched.register_forward_hook(lambda *args: None)
            self.plain.in_proj_weight.requires_grad_(False)

    model = decompose(Model())
    assert isinstance(model.plain, PlainMultiheadAttention) and model.again is model.plain
    assert not model.plain.q_proj.weight.requires_grad and model.plain.q_proj.bias.requires_grad
    for name in ("watched", "extra", "tied", "tied2"):
        assert type(getattr(model, name)) is nn.MultiheadAttention
    assert isinstance(decompose(attention()), PlainMultiheadAttention)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = attention(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no-example"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_captured(batch_first: bool, with_example: bool) -> None:
    model = SelfAttention(batch_first=batch_first).eval()
    x = torch.randn(2, 5, E)
    captured = capture(model, example=((x,), {}) if with_example else None)
    assert not captured.untraced
    targets = [n.target for n in captured.regions[""].graph_module.graph.nodes if n.op == "call_module"]
    assert targets == [f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    for other in (x, torch.randn(4, 6, E), torch.randn(6, E), torch.randn(E, E)):
        torch.testing.assert_close(captured.model(other), model(other))


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no-example"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm-first", "norm-last"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "batch-second"])
def test_encoder_layer(norm_first: bool, batch_first: bool, with_example: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, norm_first=norm_first, batch_first=batch_first, dropout=0.0).eval()
    x = torch.randn(3, 5, E)
    captured = capture(layer, example=((x,), {}) if with_example else None)
    assert not captured.untraced
    torch.testing.assert_close(captured.model(x), layer(x), rtol=1e-4, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


def test_encoder_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, 5, E), torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 5])
    captured = capture(model, example=((x,), {"src_key_padding_mask": padding}))
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(captured.model(x, src_key_padding_mask=padding), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(captured.model(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_random_ops_behind_an_attention_draw_as_behind_torchs_own(batch_first: bool, training: bool) -> None:
    """They draw in the order of memory."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.attention(x, x, x)[0], 0.5, training=True) + torch.rand_like(x)

    model, x = Noisy().train(training), torch.randn(3, 4, 8)
    for grad in (False, True):
        results = []
        for run in (model, capture(model, example=((x,), {})).model):
            torch.manual_seed(0)
            with torch.set_grad_enabled(grad):
                results.append(run(x))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("heads", "is_self"), [(2, True), (2, False), (1, True)])
def test_code_that_asks_for_the_layout_of_the_output(heads: int, is_self: bool, training: bool) -> None:
    """Torch's fused kernel for inference returns another layout than its ordinary code."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, heads, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attention(x, x, x if is_self else x * 1, need_weights=False)[0]
            return y * 2 if y.is_contiguous() else y

    model, x = Asks().train(training), torch.randn(3, 4, 8)
    captured = capture(model, example=((x,), {})).model
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(captured(x), model(x))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_writes_into_a_reshaped_output_reach_what_they_reach_in_the_model(training: bool) -> None:
    """`reshape` returns a view of a contiguous tensor, and a copy of another one."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attention(x, x, x, need_weights=False)[0]
            y.flatten(1).mul_(2)
            return y

    model, x = Writes().train(training), torch.randn(3, 4, 8)
    captured = capture(model, example=((x,), {})).model
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(captured(x), model(x))


@pytest.mark.parametrize("is_self", [True, False])
def test_inputs_may_be_written_before_the_backward(is_self: bool) -> None:
    module = attention(batch_first=True)
    query, key, value = inputs(module)
    key, value = (query, query) if is_self else (key, value)
    gradients = []
    for run in (module, PlainMultiheadAttention(module)):
        tensors = {id(x): x.clone() for x in (query, key, value)}
        output, _ = run(*(tensors[id(x)] for x in (query, key, value)))
        for tensor in tensors.values():
            tensor.mul_(2)
        output.square().sum().backward()
        gradients.append(run.out_proj.weight.grad)
    torch.testing.assert_close(*gradients)
