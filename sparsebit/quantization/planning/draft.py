"""`Draft`: a plan in the making, to which the sites, float layers and warnings of all graphs are added."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import nn

from sparsebit.config.schema import QuantConfig, TensorConfig
from sparsebit.deploy.runtimes import RuntimeProfile
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.quantization.planning.float_reasons import SWITCHED_OFF
from sparsebit.quantization.planning.sites import Plan, Site, site_of


@dataclass
class Draft:
    """`wrapped`: the modules, by id, whose sites are in it already."""

    config: QuantConfig
    profile: RuntimeProfile
    sites: dict[str, Site] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    wrapped: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Warn for each key that the user has set against the advice of the runtime's profile.

        QADD is left out: `_why_float` warns only for adds where the key changes the decision.
        """
        for setting in self.profile.costs:
            key, _, value = setting.partition("=")
            if key != "A.QADD.ENABLE_QUANT" and self.config.is_set(key) and str(attrgetter(key)(self.config)) == value:
                self.note_cost(setting)

    def plan(self) -> Plan:
        return Plan(self.config, self.sites, self.floats, tuple(self.layers), tuple(self.warnings))

    def free_name(self, wanted: str) -> str:
        """The site's name; further sites that want the same name (a layer that is called twice) get a number."""
        name, number = wanted, 1
        while name in self.names:
            number += 1
            name = f"{wanted}.{number}"
        self.names.add(name)
        return name

    def add_site(self, wanted: str, config: TensorConfig, channel_axis: int) -> str:
        name = self.free_name(wanted)
        self.sites[name] = site_of(name, config, channel_axis, narrow=self.profile.narrow_weights)
        return name

    def note_cost(self, setting: str) -> None:
        cost = f"{setting} is obeyed, against the {self.profile.name} profile: {self.profile.costs[setting]}"
        if cost not in self.warnings:
            self.warnings.append(cost)

    def note_float(self, name: str, row: OpRow | None, op: Any) -> None:
        is_op = not isinstance(op, type) or issubclass(op, nn.Module)  # else a container or an output class
        if row is None and is_op:
            op_name = getattr(op, "__name__", op)
            self.floats[name] = f"unknown op {op_name}: passes through in float (register it with register_qmodule)"
        elif row is not None and row.kind is OpKind.FLOAT:
            self.floats[name] = row.reason

    def note_disabled(self, name: str, activation: TensorConfig | None, weight: TensorConfig | None) -> None:
        given = [config for config in (activation, weight) if config is not None]
        if given and all(config.QUANTIZER.DISABLE for config in given):
            self.floats[name] = SWITCHED_OFF[0]

    def skips(self, name: str) -> bool:
        """Whether the user's config keeps this module in float."""
        return LeafPolicy(skip=self.config.SKIP_TRACE_MODULES).is_skipped(name)

    def notes_skip(self, name: str) -> bool:
        """The same; such a module is recorded."""
        is_skipped = self.skips(name)
        if is_skipped:
            self.floats[name] = SWITCHED_OFF[1]
        return is_skipped
