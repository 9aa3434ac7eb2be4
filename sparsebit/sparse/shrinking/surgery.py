"""Physical removal of channels: parameters and buffers lose positions, and layers' attributes are updated.

A `ChannelPlan` describes the removal in plain numbers, so that a folder can store it and `apply_plan` can repeat it on
the original, unpruned class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.sparse.channels.computed_weights import make_plain
from sparsebit.sparse.channels.spread_layers import spread_layer, spread_sides
from sparsebit.sparse.shrinking.pruned_attention import follow_attention, follow_encoder
from sparsebit.sparse.shrinking.skipped_block import skip_blocks

_PLAN = "_sparsebit_channel_plan"
_SIDES = ("in", 1), ("out", 0)  # of a layer, and the dimension of its weight
_MOST_POSITIONS = 1 << 28  # of one dimension: more is damage
# The new value of a module's attribute: a number, or a tuple or list of numbers.
Attribute = int | tuple[int, ...] | list[int]


@dataclass(frozen=True)
class ChannelPlan:
    """Which positions of which tensors stay, and the new values of modules' attributes."""

    # tensor -> dimension -> the positions that stay, in order
    kept: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    # module -> attribute -> new value; attributes that follow from the shapes of a torch.nn layer are left out
    attributes: Mapping[str, Mapping[str, Attribute]] = field(default_factory=dict)
    # residual blocks that are removed as a whole: names of modules
    skipped: tuple[str, ...] = ()
    # convolutions that get their computed weights, and the new form of each
    computed: Mapping[str, str] = field(default_factory=dict)
    # layers whose activations keep their width: on which sides, of "in" and "out"
    spread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # of removed blocks: the norms after their additions, which stay
    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; runs of positions are written as [first, last]."""
        kept = {tensor: {str(dim): _runs(places) for dim, places in dims.items()} for tensor, dims in self.kept.items()}
        return {**vars(self), "kept": kept}

    def after(self, earlier: ChannelPlan) -> ChannelPlan:
        """The plan with the combined effect of `earlier` and then this one."""
        kept = {tensor: dict(dims) for tensor, dims in earlier.kept.items()}
        for tensor, dims in self.kept.items():
            for dim, places in dims.items():
                before = kept.setdefault(tensor, {}).get(dim)
                kept[tensor][dim] = places if before is None else tuple(before[place] for place in places)
        attributes = {module: dict(values) for module, values in earlier.attributes.items()}
        for module, values in self.attributes.items():
            attributes.setdefault(module, {}).update(values)
        spread = dict(earlier.spread)
        for module, sides in self.spread.items():
            spread[module] = tuple(sorted({*spread.get(module, ()), *sides}))
        skipped, computed = (*earlier.skipped, *self.skipped), {**earlier.computed, **self.computed}
        return ChannelPlan(kept, attributes, skipped, computed, spread, {**earlier.norms, **self.norms})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ChannelPlan:
        try:
            kept = {
                tensor: {int(dim): _positions(runs) for dim, runs in dims.items()}
                for tensor, dims in value["kept"].items()
            }
            attributes = {module: dict(values) for module, values in value["attributes"].items()}
            # Folders of earlier versions have only the two keys above.
            skipped, computed = tuple(value.get("skipped", ())), dict(value.get("computed", {}))
            spread, norms = (
                {name: tuple(items) for name, items in value.get(key, {}).items()} for key in ("spread", "norms")
            )
            return cls(kept, attributes, skipped, computed, spread, norms)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the channel plan is damaged ({error!r})") from None


def _runs(places: tuple[int, ...]) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in places:
        if not runs or runs[-1][1] != place - 1:
            runs.append([place, place])
        runs[-1][1] = place
    return runs


def _positions(runs: list[list[int]]) -> tuple[int, ...]:
    ends = [end for first, last in runs for end in (first, last + 1)]
    if ends != sorted(ends) or min(ends, default=0) < 0 or max(ends, default=0) > _MOST_POSITIONS:
        raise ValueError(f"positions that stay are ascending ranges [first, last], not {str(runs)[:60]}")
    return tuple(place for first, last in runs for place in range(first, last + 1))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def apply_plan(model: nn.Module, plan: ChannelPlan) -> None:
    """Make the model smaller, in place. The same plan fits every model of the same class and widths."""
    make_plain(model, plan.computed)
    tensors = named_tensors(model)
    if missing := sorted(set(plan.kept) - set(tensors)):
        raise CheckpointError(f"the channel plan is of another model: there is no {missing[0]} here")
    smaller: dict[int, Tensor] = {}
    for name, dims in plan.kept.items():
        tensor = tensors[name]
        for dim, places in dims.items():
            if not 0 <= dim < tensor.dim() or not places or places[-1] >= tensor.shape[dim]:
                raise CheckpointError(
                    f"the channel plan is of another model: {name} has the shape {tuple(tensor.shape)}, and the plan "
                    f"keeps {f'position {places[-1]}' if places else 'no position'} of dimension {dim}"
                )
        smaller[id(tensor)] = _sliced(tensor, dims)
    # A parameter may be held in several places: by tied layers, or in lists such as `nn.LSTM._flat_weights`.
    for module in model.modules():
        for key in vars(module).keys() - {"_modules"}:
            vars(module)[key] = _replaced(vars(module)[key], smaller)
    for path, values in plan.attributes.items():
        module = model.get_submodule(path)
        for name, number in values.items():
            is_tuple = isinstance(getattr(module, name), tuple)
            setattr(module, name, tuple(number) if is_tuple and not isinstance(number, int) else number)
    for path, sides in plan.spread.items():
        kept = plan.kept[f"{path}.weight".removeprefix(".")]
        spread_layer(model.get_submodule(path), *(kept[d] if side in sides else None for side, d in _SIDES))
    # `follow_encoder` looks for attentions whose class `follow_attention` has changed.
    for module in reversed(list(model.modules())):  # parts before what holds them
        _follow_shapes(module)
    skip_blocks(model, plan.skipped, plan.norms)
    earlier = plan_of(model)
    model.__dict__[_PLAN] = plan if earlier is None else plan.after(earlier)


def _replaced(value: Any, smaller: Mapping[int, Tensor], depth: int = 4) -> Any:
    """An attribute that holds parameters or buffers (a list of weights), with the smaller ones in their place."""
    if isinstance(value, Tensor):
        return smaller.get(id(value), value)
    if type(value) not in (list, tuple, dict) or not depth:
        return value
    items = value.values() if isinstance(value, dict) else value
    found = [_replaced(item, smaller, depth - 1) for item in items]
    if all(one is other for one, other in zip(found, items, strict=True)):
        return value
    return dict(zip(value, found, strict=True)) if isinstance(value, dict) else type(value)(found)


def plan_of(model: nn.Module) -> ChannelPlan | None:
    """The plan of everything removed since the model was built from its class; None: nothing was removed."""
    found: ChannelPlan | None = model.__dict__.get(_PLAN)
    return found


def _sliced(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> Tensor:
    data = tensor.detach()
    for dim, places in dims.items():
        data = data.index_select(dim, torch.tensor(places, dtype=torch.long, device=data.device))
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _follow_shapes(module: nn.Module) -> None:
    """The attributes of torch.nn layers that repeat the shapes of their parameters."""
    weight: Any = getattr(module, "weight", None)
    reads_wider, writes_wider = spread_sides(module)
    shape = weight.shape if isinstance(weight, Tensor) else None
    match module:
        case nn.RNNBase():
            module.input_size = module.get_parameter("weight_ih_l0").shape[1]
            num_gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
            module.hidden_size = module.get_parameter("weight_hh_l0").shape[0] // num_gates
            module.proj_size = module.get_parameter("weight_hr_l0").shape[0] if module.proj_size else 0
        case nn.RNNCellBase():
            module.input_size, module.hidden_size = module.weight_ih.shape[1], module.weight_hh.shape[1]
        case nn.MultiheadAttention():
            follow_attention(module)
        case nn.TransformerEncoder():
            follow_encoder(module)
        case nn.modules.batchnorm._NormBase():
            if (vector := module.running_mean if shape is None else weight) is not None:
                module.num_features = len(vector)
        case _ if shape is None:
            return
        case nn.Bilinear():
            module.out_features, module.in1_features, module.in2_features = shape
        case nn.Linear():
            module.in_features = module.in_features if reads_wider else shape[1]
            module.out_features = module.out_features if writes_wider else shape[0]
        case nn.modules.conv._ConvNd():
            first, second = shape[0], shape[1] * module.groups
            taken, given = (first, second) if module.transposed else (second, first)
            module.in_channels = module.in_channels if reads_wider else taken
            module.out_channels = module.out_channels if writes_wider else given
        case nn.GroupNorm():
            module.num_channels = shape[0]
        case nn.Embedding():
            module.embedding_dim = shape[1]
        case nn.PReLU():
            module.num_parameters = shape[0]
