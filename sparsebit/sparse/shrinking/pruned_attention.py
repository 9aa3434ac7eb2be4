"""`nn.MultiheadAttention` with fewer heads than its width has room for.

Torch's own code uses one number for the width of the input and of all heads together, so heads alone cannot be
removed from it. `apply_plan` changes an attention that lost heads to this class; its parameters keep their names.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.passes.decompose import PlainTransformerEncoder, attention_layout, may_fuse


class PrunedMultiheadAttention(nn.MultiheadAttention):
    """The same function with `num_heads * head_dim` rows in each projection, whatever `embed_dim` is.

    The operators are those of torch, in the same order.
    """

    # The class `sparsebit.quantize` may decompose into projections, products and softmax.
    is_decomposable = True

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
        is_batched = query.dim() == 3
        is_fused = may_fuse(self) and query is key and key is value
        other = F._none_or_dtype(attn_mask)
        padding = F._canonical_mask(key_padding_mask, "key_padding_mask", other, "attn_mask", query.dtype)
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
        is_causal = is_causal and padding is None
        mask = None if is_causal and not need_weights else mask
        query, key, value = self._with_length_first(query, key, value, is_batched)
        (length, batch, _), num_keys = query.shape, key.shape[0]
        q, k, v = self._projected(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = torch.cat([k, self.bias_k.repeat(1, batch, 1)]), torch.cat([v, self.bias_v.repeat(1, batch, 1)])
        # (length, batch, heads * width) -> (batch * heads, length, width)
        rows = batch * self.num_heads, self.head_dim
        q, k, v = (x.contiguous().view(x.shape[0], *rows).transpose(0, 1) for x in (q, k, v))
        if self.add_zero_attn:
            shape = rows[0], 1, rows[1]
            k, v = (torch.cat([x, torch.zeros(shape, dtype=x.dtype, device=x.device)], 1) for x in (k, v))
        if mask is not None and mask.dim() == 2:
            mask = mask.unsqueeze(0)
        num_more = k.shape[1] - num_keys
        mask, padding = (x if x is None or not num_more else F.pad(x, (0, num_more)) for x in (mask, padding))
        if padding is not None:
            padding = padding.reshape(batch, 1, 1, -1).expand(-1, self.num_heads, -1, -1).flatten(0, 1)
            mask = padding if mask is None else mask + padding
        if need_weights:
            output, weights = self._with_weights(q, k, v, mask)
            output = output.transpose(0, 1).reshape(length * batch, -1)
        else:
            output, weights = self._without_weights(q, k, v, mask, batch, is_causal), None
            output = output.permute(2, 0, 1, 3).reshape(length * batch, -1)
        output = F.linear(output, self.out_proj.weight, self.out_proj.bias).view(length, batch, -1)
        if weights is not None:
            weights = weights.view(batch, self.num_heads, length, -1)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        if not is_batched:
            return output.squeeze(1), weights
        if self.batch_first:
            output = attention_layout(output.transpose(0, 1), is_fused, self.training)
        return output, weights

    def _with_length_first(self, query: Tensor, key: Tensor, value: Tensor, is_batched: bool) -> tuple[Tensor, ...]:
        """As (length, batch, width). Arguments that are the same tensor stay the same: `_projected` asks for that."""
        if is_batched and not self.batch_first:
            return query, key, value
        parts = {id(x): x.transpose(0, 1) if is_batched else x.unsqueeze(1) for x in (query, key, value)}
        return parts[id(query)], parts[id(key)], parts[id(value)]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        rows = self.num_heads * self.head_dim
        if weight is not None and query is key is value:
            q, k, v = F.linear(query, weight, bias).split(rows, dim=-1)
        elif weight is not None and key is value:
            (one, two), (first, second) = (
                (None, None) if x is None else x.split([rows, 2 * rows]) for x in (weight, bias)
            )
            q, (k, v) = F.linear(query, one, first), F.linear(key, two, second).split(rows, dim=-1)
        else:
            own = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights = own if weight is None else weight.chunk(3)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            q, k, v = (F.linear(*parts) for parts in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _with_weights(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scaled = q * math.sqrt(1.0 / self.head_dim)
        keys = k.transpose(-2, -1)
        scores = torch.bmm(scaled, keys) if mask is None else torch.baddbmm(mask, scaled, keys)
        weights = F.softmax(scores, dim=-1)
        if self.training and self.dropout > 0:
            weights = F.dropout(weights, p=self.dropout)
        return torch.bmm(weights, v), weights

    def _without_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, batch: int, is_causal: bool
    ) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(batch, self.num_heads, -1, k.shape[1])
        q, k, v = (x.view(batch, self.num_heads, -1, self.head_dim) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal)


def follow_attention(module: nn.MultiheadAttention) -> None:
    """Set the numbers of an attention to the shapes of its parameters; with fewer heads it gets another class."""
    query: Tensor = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
    rows = query.shape[0] // (1 if module.in_proj_weight is None else 3)
    module.embed_dim = module.kdim = module.vdim = query.shape[1]
    if module.in_proj_weight is None:
        module.kdim, module.vdim = module.k_proj_weight.shape[1], module.v_proj_weight.shape[1]
    if rows % module.head_dim == 0:
        module.num_heads = rows // module.head_dim
    if type(module) is nn.MultiheadAttention and rows != module.embed_dim:
        module.__class__ = PrunedMultiheadAttention
        module._qkv_same_embed_dim = False  # by this, encoder layers know that their fused kernel does not fit


def follow_encoder(module: nn.TransformerEncoder) -> None:
    """An encoder with such an attention takes padded batches as they are: nested tensors are for fused kernels."""
    has_pruned = any(isinstance(part, PrunedMultiheadAttention) for part in module.modules())
    if has_pruned and type(module) is nn.TransformerEncoder and module.use_nested_tensor:
        module.__class__ = PlainTransformerEncoder
