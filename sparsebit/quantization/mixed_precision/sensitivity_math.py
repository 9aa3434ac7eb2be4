"""The effect of a small error of one tensor on the outputs: the Fisher form, and distances between outputs.

Legend: `z` the outputs of the float model, `J` their Jacobian by one tensor, `d` the quantization error of that tensor,
`F` the Fisher matrix of the outputs. To second order the divergence of the quantized model's outputs is

    KL(p(z) || p(z + J d))  ~  1/2 d^T J^T F J d  =  1/2 E_v[(v^T J d)^2]     where E[v v^T] = F

(Martens, New insights on the natural gradient method, section 9; BRECQ, section 3.2). `v^T J` is one backward pass.
Vectors of different samples are independent with mean zero, so the products over several samples have the same mean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fisher_direction(scores: Tensor, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
    """`v` with `E[v v^T] = diag(p) - p p^T`, the Fisher matrix of a softmax over the last axis of
    `scores / temperature`.

    `v = sqrt(p) e - p (sqrt(p) . e)` with normal `e`. A gradient of a label drawn from `p` has the same covariance, but
    its square has a far larger variance if the model is certain.
    """
    p = (scores.float() / temperature).softmax(-1)
    noise = torch.randn(p.shape, generator=generator).to(p)
    weighted = p.sqrt() * noise
    return weighted - p * weighted.sum(-1, keepdim=True)


def value_direction(values: Tensor, generator: torch.Generator) -> Tensor:
    """`v` with `E[v v^T] = 2 I / |z|^2`, |z|^2 of one sample: half the square is the error relative to the signal."""
    size = values.float().square().sum() / max(1, len(values))
    return torch.randn(values.shape, generator=generator).to(values) * (2 / size.clamp_min(1e-30)).sqrt()


def products(gradient: Tensor, error: Tensor, num_samples: int) -> Tensor:
    """`g . d` of each sample, `(num_samples,)`; one product of all, `(1,)`, if the first axis is not the samples."""
    product = gradient.float() * error.float()
    if product.ndim and product.shape[0] == num_samples:
        return product.reshape(num_samples, -1).sum(1)
    return product.sum().reshape(1)


def divergence(scores: Tensor, original: Tensor) -> Tensor:
    """KL(p of the float model || p of the quantized one), summed over all distributions along the last axis."""
    found = F.kl_div(
        scores.double().log_softmax(-1), original.double().log_softmax(-1), reduction="sum", log_target=True
    )
    return found.clamp_min(0)
