"""`nn.MultiheadAttention` -> projections, products and softmax as ops of their own, so that each can be quantized.

Runs before the trace, on modules. torch's fused path for inference returns another memory layout, and zeros at padded
positions. Code after the attention may notice both, so they are reproduced at run time (`attention_layout`,
`clear_padding`), when it is known which path torch would take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.nodes.example import UNKNOWN, value_of
from sparsebit.graph.nodes.hidden_writes import module_may_write
from sparsebit.graph.nodes.random_ops import class_may_draw, class_reads_layout


def decompose(model: nn.Module) -> nn.Module:
    """`model` with every decomposable attention replaced, in place; shared modules stay shared."""
    held = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    # The memory layout of an output matters in three cases: random ops draw in the order of memory, code may branch on
    # the layout, and a write into `x.reshape(...)` reaches `x` or a copy of it, depending on the layout.
    kinds: list[Any] = [type(module) for module in model.modules() if not isinstance(module, nn.MultiheadAttention)]
    keeps_layout = any(class_may_draw(kind) or class_reads_layout(kind) for kind in kinds) or module_may_write(model)
    plain = {
        module: PlainMultiheadAttention(module, keeps_layout=keeps_layout)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and _is_decomposable(module, held)
    }
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in plain:
                parent._modules[name] = plain[child]
        if type(parent) is nn.TransformerEncoder and parent.use_nested_tensor:
            parent.__class__ = PlainTransformerEncoder
    return plain.get(model, model)  # type: ignore[call-overload, no-any-return]


def _is_decomposable(module: nn.MultiheadAttention, held: Counter[int]) -> bool:
    is_known = type(module) is nn.MultiheadAttention or getattr(type(module), "is_decomposable", False)
    is_plain = is_known and module.bias_k is None and not module.add_zero_attn
    is_watched = module._forward_hooks or module._forward_pre_hooks
    # A weight that another layer holds as well must stay one tensor, and the projections would split it.
    return is_plain and not is_watched and all(held[id(parameter)] == 1 for parameter in module.parameters())


class PlainMultiheadAttention(nn.Module):
    """The same function as `nn.MultiheadAttention`, written out.

    attention = softmax(q·k^T/sqrt(d) + mask)·v per head; inputs (L, N, E), or (N, L, E) with batch_first.
    """

    # nn.TransformerEncoderLayer reads these before it takes its fused path, which would bypass the projections.
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = None

    def __init__(self, original: nn.MultiheadAttention, *, keeps_layout: bool = False) -> None:
        """`keeps_layout`: the output has the memory layout of the original's."""
        super().__init__()
        self.keeps_layout = keeps_layout
        # The conditions of torch's fused kernel for inference that are known when the module is built.
        self.may_fuse = may_fuse(original) and original.num_heads % 2 == 0
        self.embed_dim, self.num_heads, self.head_dim = original.embed_dim, original.num_heads, original.head_dim
        self.heads_dim = self.num_heads * self.head_dim  # less than embed_dim where heads were pruned
        self.batch_first, self.dropout = original.batch_first, original.dropout
        weights: tuple[Tensor, ...] = (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
        if original.in_proj_weight is not None:
            weights = original.in_proj_weight.chunk(3)
        biases = original.in_proj_bias.chunk(3) if original.in_proj_bias is not None else (None,) * 3
        self.q_proj, self.k_proj, self.v_proj = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out_proj = _linear(original.out_proj.weight, original.out_proj.bias)
        self.train(original.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as the original
        unbatched = _rank(query, 3) == 2
        is_fused = self.may_fuse and not unbatched and query is key and key is value
        per_head = attn_mask is not None and _rank(attn_mask, 2) == 3
        if unbatched:
            axis = 0 if self.batch_first else 1
            query, key, value = query.unsqueeze(axis), key.unsqueeze(axis), value.unsqueeze(axis)
            key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
        if not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        elif not unbatched and not isinstance(query, fx.Proxy) and torch.is_grad_enabled():
            # Torch's own projections read (L, N, E), a copy: later code may write into the inputs before a backward.
            copies = {id(tensor): tensor.clone() for tensor in (query, key, value)}  # the same tensor, the same copy
            query, key, value = copies[id(query)], copies[id(key)], copies[id(value)]
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        q = self._split(self.q_proj(query), batch, queries) * (1.0 / math.sqrt(self.head_dim))
        k = self._split(self.k_proj(key), batch, keys)
        v = self._split(self.v_proj(value), batch, keys)
        scores = torch.matmul(q, k.transpose(-2, -1))
        if attn_mask is not None:
            mask = _additive(attn_mask, scores)
            scores = scores + (mask.reshape(batch, self.num_heads, queries, keys) if per_head else mask)
        if key_padding_mask is not None:
            scores = scores + _additive(key_padding_mask, scores).reshape(batch, 1, 1, keys)
        weights = F.dropout(torch.softmax(scores, dim=-1), p=self.dropout, training=self.training)
        heads = torch.matmul(weights, v)
        if self.batch_first:
            output = self.out_proj(heads.transpose(1, 2).reshape(batch, queries, self.heads_dim))
            if self.keeps_layout:
                output = _at_run_time(attention_layout, output, is_fused, self.training)
        else:
            output = self.out_proj(heads.permute(2, 0, 1, 3).reshape(queries, batch, self.heads_dim))
        if unbatched:
            output = output.squeeze(0 if self.batch_first else 1)
        if not need_weights:
            return output, None
        shown = weights.mean(dim=1) if average_attn_weights else weights
        return output, shown.squeeze(0) if unbatched else shown

    def _split(self, x: Tensor, batch: Any, length: Any) -> Tensor:
        return x.reshape(batch, length, self.num_heads, self.head_dim).transpose(1, 2)


def _at_run_time(function: Callable[..., Tensor], x: Any, *rest: Any) -> Tensor:
    """`function(x, *rest)`; in a trace one node, because the modes that the function reads are those of the call."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *rest), {})  # type: ignore[return-value]
    return function(x, *rest)


def attention_layout(output: Tensor, is_fused: bool, is_training: bool) -> Tensor:
    """The same values, in memory as (N, L, E) where torch's fused kernel computes them, otherwise as (L, N, E).

    output (N, L, E)
    """
    if torch.compiler.is_exporting():  # a file has no layout in memory
        return output
    if is_fused and not is_training and not (torch.is_grad_enabled() and output.requires_grad):
        return output.contiguous()
    return output.transpose(0, 1).contiguous().transpose(0, 1)


def may_fuse(module: nn.MultiheadAttention) -> bool:
    """Whether torch's fused kernel may compute this attention, where it has an even number of heads."""
    return module.batch_first and module.in_proj_weight is not None and module.in_proj_bias is not None


class PlainTransformerEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` on padded batches, without the nested tensors that only its fused layers take."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        output = src
        for layer in self.layers:
            masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask}
            output = layer(output, **masks, is_causal=is_causal is True)
        if mask is None and src_key_padding_mask is not None:
            output = _at_run_time(clear_padding, output, src_key_padding_mask, self.layers[0].training)
        return output if self.norm is None else self.norm(output)


def clear_padding(output: Tensor, padding: Tensor, is_training: bool) -> Tensor:
    """Zeros at padded positions, as nested tensors leave them: in eval mode, without gradients, padding at the end.

    output (N, L, E), padding (N, L): True or -inf = hidden.
    """
    is_plain = is_training or output.dim() != 3 or torch.is_autocast_enabled()
    if is_plain or (torch.is_grad_enabled() and output.requires_grad):
        return output
    hidden = padding if padding.dtype == torch.bool else padding == float("-inf")
    if not torch.compiler.is_compiling() and bool((hidden[:, :-1] & ~hidden[:, 1:]).any()):
        return output
    return output.masked_fill(hidden.unsqueeze(-1), 0.0)


def _rank(x: Tensor, usual: int) -> int:
    """The number of dimensions; in a trace without an example the usual one, guarded."""
    if isinstance(x, fx.Proxy) and value_of(x.node) is UNKNOWN:
        x.tracer.add_guard(x.dim().node, usual)
        return usual
    return int(x.dim())


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    """A boolean mask (True = hidden) as numbers to add; a float mask unchanged."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))
    return mask


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            setattr(linear, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
    return linear
