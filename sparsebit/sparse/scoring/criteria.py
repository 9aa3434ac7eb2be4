"""Criteria: how important each number of a weight is. The least important are pruned first.

A criterion is a function from the `Evidence` about one parameter to scores of the same shape, or None if it does
not judge this kind of parameter. `register_criterion` adds one:

>>> @register_criterion("distance_to_one")
... def distance_to_one(evidence: Evidence) -> Tensor | None:
...     return (evidence.weight - 1).abs()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from sparsebit.numerics.rounding.layer_matrix import LayerMatrix
from sparsebit.numerics.rounding.pruning_math import fit_masked, obs_scores, sparse_gpt_scores
from sparsebit.registry import Registry

Need = Literal["gradients", "inputs", "moments", "signs", "ranks"]


@dataclass(frozen=True)
class LayerMoments:
    """`hessian (groups, columns, columns)`: second moments of a layer's input; `form`: its weight as a matrix."""

    form: LayerMatrix
    hessian: Tensor


@dataclass(frozen=True)
class Evidence:
    """The data about one parameter that criteria may use.

    `gradient` and `squared_gradient`: means over batches; `input_norms`: the L2 norm of each input channel of the
    layer, over all data, one per column of the weight. `moments`: the second moments of the layer's input. `outputs`:
    one number for each output channel: the share of positive values ("signs") or the mean rank of its maps ("ranks"),
    behind the norm that reads the layer, if there is one. They are None unless the criterion needs them. `ratio`: the
    config's ratio for this layer; None if all layers share one. `pattern`: (n, m) of N:M.
    """

    name: str
    module: nn.Module
    weight: Tensor
    gradient: Tensor | None = None
    squared_gradient: Tensor | None = None
    input_norms: Tensor | None = None
    moments: LayerMoments | None = None
    outputs: Tensor | None = None
    ratio: float | None = None
    pattern: tuple[int, int] | None = None

    @property
    def is_norm(self) -> bool:
        """Whether the parameter is one of a normalization layer."""
        return isinstance(self.module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns: the weight of a convolution or a linear layer."""
        return self.weight.dim() > 1 and not self.is_norm


Score = Callable[[Evidence], Tensor | None]
# (evidence, mask) -> the weight that compensates for the removed elements
Update = Callable[[Evidence, Tensor], Tensor]


@dataclass(frozen=True)
class Criterion:
    """A registered criterion: its function, the data that it needs, and how the remaining weights are changed."""

    score: Score
    needs: Need | None = None
    update: Update | None = None

    def scores(self, evidence: Mapping[str, Evidence]) -> dict[str, Tensor]:
        """The scores of all parameters that it judges, by name."""
        return {name: found for name, entry in evidence.items() if (found := self.score(entry)) is not None}


CRITERIA: Registry[object] = Registry("criterion")


def register_criterion(
    name: str,
    *,
    aliases: tuple[str, ...] = (),
    needs: Need | None = None,
    update: Update | None = None,
    replace: bool = False,
) -> Callable[[Score], Score]:
    """A decorator that makes a function a `SPARSER.STRATEGY`.

    `needs`: "gradients" (of a loss), "inputs" (norms of the layers' inputs), "moments" (their second moments), "signs"
    or "ranks" (of the layers' outputs): `calc_params` is then given batches. `update`: (evidence, mask) -> the weight
    that compensates for the removed elements.
    """

    def file(score: Score) -> Score:
        CRITERIA.register(name, aliases=aliases, replace=replace)(Criterion(score, needs, update))
        return score

    return file


def criterion(name: str) -> Criterion:
    """The criterion of a name; a miss names the nearest ones."""
    return cast("Criterion", CRITERIA.get(name))


@register_criterion("l0norm", aliases=("l0",))
def l0norm(evidence: Evidence) -> Tensor | None:
    """1 where a weight is not zero: a channel's score is its number of remaining weights after unstructured pruning."""
    return (evidence.weight != 0).to(evidence.weight.dtype) if evidence.is_matrix else None


@register_criterion("l1norm", aliases=("l1", "magnitude"))
def l1norm(evidence: Evidence) -> Tensor | None:
    """Absolute values (Li et al. 2017 for filters)."""
    return evidence.weight.abs() if evidence.is_matrix else None


@register_criterion("l2norm", aliases=("l2",))
def l2norm(evidence: Evidence) -> Tensor | None:
    """Squares, so that a channel's score is its squared L2 norm."""
    return evidence.weight.square() if evidence.is_matrix else None


@register_criterion("random")
def random(evidence: Evidence) -> Tensor | None:
    """Random numbers from torch's generator: the baseline."""
    return torch.rand_like(evidence.weight) if evidence.is_matrix else None


@register_criterion("slimming", aliases=("bn_scale", "bnscale"))
def slimming(evidence: Evidence) -> Tensor | None:
    """The scales of norm layers (Network Slimming, Liu et al. 2017); train with `scale_penalty` before."""
    return evidence.weight.abs() if evidence.is_norm and evidence.name.endswith("weight") else None


@register_criterion("taylor", needs="gradients")
def taylor(evidence: Evidence) -> Tensor | None:
    """|weight x gradient|: the first-order estimate of the loss change (Molchanov et al. 2019)."""
    assert evidence.gradient is not None
    return (evidence.weight * evidence.gradient).abs()


@register_criterion("fisher", needs="gradients")
def fisher(evidence: Evidence) -> Tensor | None:
    """weight^2 x mean squared gradient: the change of the loss by the empirical Fisher information."""
    assert evidence.squared_gradient is not None
    return evidence.weight.square() * evidence.squared_gradient


@register_criterion("wanda", needs="inputs")
def wanda(evidence: Evidence) -> Tensor | None:
    """|weight| x norm of its input channel (Sun et al. 2023)."""
    if not evidence.is_matrix or evidence.input_norms is None:
        return None
    return evidence.weight.abs() * evidence.input_norms.view([-1] + [1] * (evidence.weight.dim() - 2))


def _taken_up(evidence: Evidence, mask: Tensor) -> Tensor:
    """The weight under the mask whose outputs are nearest to those of the unmasked one."""
    weight = evidence.weight
    if evidence.moments is None:
        return weight * mask
    form, hessian = evidence.moments.form, evidence.moments.hessian
    found = fit_masked(form.matrix(weight).to(hessian), hessian, hessian, form.matrix(mask))
    return form.weight(found, weight.shape).to(weight)


def _of_moments(evidence: Evidence, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if evidence.moments is None:
        return None
    form, hessian = evidence.moments.form, evidence.moments.hessian
    return form.weight(score(form.matrix(evidence.weight).to(hessian), hessian), evidence.weight.shape)


@register_criterion("obs", needs="moments", update=_taken_up)
def obs(evidence: Evidence) -> Tensor | None:
    """weight^2 / (H^-1)_jj: the loss of removing a weight when the others compensate (Hassibi and Stork 1993)."""
    return _of_moments(evidence, obs_scores)


@register_criterion("sparsegpt", needs="moments", update=_taken_up)
def sparsegpt(evidence: Evidence) -> Tensor | None:
    """The same, with each column scored after the ones before it were removed (Frantar and Alistarh 2023).

    With one ratio over all layers, or for whole channels, it is `obs`.
    """
    if evidence.ratio is None and evidence.pattern is None:
        return obs(evidence)
    return _of_moments(evidence, lambda w, h: sparse_gpt_scores(w, h, evidence.ratio or 0.0, evidence.pattern))


def _of_channels(values: Tensor | None, evidence: Evidence) -> Tensor | None:
    """One value per output channel, expanded to all weights of the channel."""
    if not evidence.is_matrix or values is None or values.shape != evidence.weight.shape[:1]:
        return None
    return values.view([-1] + [1] * (evidence.weight.dim() - 1)).expand_as(evidence.weight)


@register_criterion("apoz", needs="signs")
def apoz(evidence: Evidence) -> Tensor | None:
    """The share of outputs that an activation leaves above zero (Hu et al. 2016)."""
    return _of_channels(evidence.outputs, evidence)


@register_criterion("hrank", needs="ranks")
def hrank(evidence: Evidence) -> Tensor | None:
    """The mean rank of each output map (Lin et al. 2020)."""
    return _of_channels(evidence.outputs, evidence)


@register_criterion("geometric_median", aliases=("fpgm",))
def geometric_median(evidence: Evidence) -> Tensor | None:
    """The distance of each filter to all others: the most replaceable go first (He et al. 2019)."""
    if not evidence.is_matrix:
        return None
    rows = evidence.weight.flatten(1)
    return _of_channels(torch.cdist(rows, rows).sum(1) / rows.shape[1], evidence)


@register_criterion("lamp")
def lamp(evidence: Evidence) -> Tensor | None:
    """weight^2 over the sum of all squares that are not smaller: comparable across layers (Lee et al. 2021)."""
    if not evidence.is_matrix:
        return None
    squares, order = evidence.weight.flatten().square().sort()
    # The smallest normal number: a weight of zeros would divide 0 by 0.
    remaining = squares.flip(0).cumsum(0).flip(0).clamp_min(torch.finfo(squares.dtype).tiny)
    scores = torch.empty_like(squares)
    scores[order] = squares / remaining
    return scores.view_as(evidence.weight)


def scale_penalty(model: nn.Module) -> Tensor:
    """The sum of the absolute scales of all batch norms: times 1e-4, it is added to the loss before `slimming`."""
    scales = [m.weight for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine]
    return torch.stack([scale.abs().sum() for scale in scales]).sum() if scales else torch.zeros(())
