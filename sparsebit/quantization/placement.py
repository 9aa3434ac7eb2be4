"""`Plan`: which tensors are quantized and how, as a value; how its sites are named, and the number format of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from sparsebit.config.schema import ActivationConfig, TensorConfig, WeightConfig
from sparsebit.graph.node_names import node_name
from sparsebit.graph.op_rows import OpRow
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec


@dataclass
class RegionPlan:
    """`inputs[consumer][source]`: how the consumer wants that input; `gates`: `silu` whose sigmoid is quantized too."""

    inputs: dict[fx.Node, dict[fx.Node, ActivationConfig]] = field(default_factory=dict)
    outputs: dict[fx.Node, ActivationConfig] = field(default_factory=dict)
    weights: dict[fx.Node, WeightConfig] = field(default_factory=dict)
    gates: dict[fx.Node, ActivationConfig] = field(default_factory=dict)


@dataclass
class LoosePlan:
    """A layer inside an untraced module."""

    row: OpRow
    input: ActivationConfig | None
    weight: WeightConfig | None


@dataclass
class Plan:
    """The whole model's placement: per region, per loose layer; `floats`: layers without a quantizer and the reason;
    `warnings`: what the user's own keys cost against the runtime's profile.
    """

    regions: dict[str, RegionPlan] = field(default_factory=dict)
    loose: dict[str, LoosePlan] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def layer_name(region_path: str, node: fx.Node) -> str:
    """A node's name for configs and reports: its module's path, or the path of the module that calls it and the op."""
    return f"{region_path}.{node_name(node)}" if region_path else node_name(node)


def split_site(site: str) -> tuple[str, str]:
    """A quantizer's name as layer and role: `layer1.conv.input.0` -> (`layer1.conv`, `input.0`)."""
    parts = site.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index] in ("input", "weight", "output", "shared", "gate"):
            return ".".join(parts[:index]), ".".join(parts[index:])
    return site, "input"


def spec_of(config: TensorConfig, channel_axis: int) -> TensorSpec:
    """The number format that one tensor's config asks for; `channel_axis` is the tensor's own."""
    granularity: Granularity = PerTensor()
    if config.granularity == "channel":
        granularity = PerChannel(channel_axis)
    elif config.granularity == "group":
        assert isinstance(config, WeightConfig)
        granularity = PerGroup(1 - channel_axis, config.QUANTIZER.GROUP_SIZE)
    return TensorSpec(config.QUANTIZER.BIT, config.symmetric, granularity)


def feature_axis(config: ActivationConfig) -> int:
    return 1 if config.OBSERVER.LAYOUT == "NCHW" else -1
