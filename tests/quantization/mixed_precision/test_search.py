from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import sparsebit
from sparsebit.errors import BudgetError, CalibrationError, ConfigError
from sparsebit.quantization import (
    BitSearch,
    QuantModel,
    SiteBudget,
    pareto_curve,
    parse_qconfig,
    search_bits,
    sensitivity,
)
from sparsebit.quantization.mixed_precision.site_facts import facts_of
from tests.quantization.tiny import MaskFirst, Mixed, masked_batches

pytest.importorskip("scipy")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.conv2(torch.relu(self.conv1(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x))).mean((2, 3))
        return torch.cat([self.left(x), self.right(x)], 1)


CONFIG = """
{DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}, QADD: {ENABLE_QUANT: true}}}
"""


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, 3, 6, 6, generator=torch.Generator().manual_seed(1)))


def calibrated(config: Any = CONFIG, model: nn.Module | None = None) -> QuantModel:
    return sparsebit.quantize(model or Net().eval(), batches(), config)


def rebuilt(found: BitSearch) -> QuantModel:
    return sparsebit.quantize(Net().eval(), batches(), parse_qconfig(found.config.to_yaml()))


def weight_bytes(qmodel: QuantModel) -> int:
    return sum(parameter.bytes for parameter in qmodel.coverage.parameters)


def test_the_config_alone_rebuilds_the_model() -> None:
    found = search_bits(
        calibrated(),
        batches(),
        {"weight_bits": 4, "activation_bits": 6},
        weight_bits=(2, 3, 4, 8),
        activation_bits=(4, 6, 8),
    )
    plan = rebuilt(found).plan
    assert {site: plan[site].spec.bits for site in plan} == dict(found.bits)
    assert found.spent["weight_bits"] <= 4 and found.spent["activation_bits"] <= 6
    assert len({found.bits[site] for site in plan if site.endswith(".weight")}) > 1
    assert found.gap < 1e-3 and "weight_bits" in str(found) and found.to_dict()["bits"] == dict(found.bits)


def test_bytes_are_those_of_the_model() -> None:
    qmodel = calibrated()
    half = search_bits(qmodel, batches(), {"bytes": 0.5}, weight_bits=(2, 4, 8))
    assert half.spent["bytes"] == weight_bytes(rebuilt(half)) <= 0.5 * weight_bytes(qmodel)
    absolute = search_bits(qmodel, batches(), {"bytes": weight_bytes(rebuilt(half))}, weight_bits=(2, 4, 8))
    assert absolute.bits == half.bits


def test_no_choice_is_better_than_what_the_budget_of_uniform_bits_allows() -> None:
    qmodel = calibrated()
    scores = sensitivity(qmodel, batches(), weight_bits=(2, 3, 4, 6, 8))
    found = search_bits(qmodel, batches(), {"weight_bits": 4}, sensitivity=scores)
    uniform = sum(row.get(4, row[max(row)]) for row in scores.scores.values())
    assert found.loss <= uniform


def test_bops_count_weights_times_activations() -> None:
    qmodel = calibrated()
    own = search_bits(qmodel, batches(), {"bops": 1.0}, weight_bits=(8,))
    multiplications = 36 * (8 * 27 + 4 * 8 * 72) + 2 * 6 * 8
    assert own.limits["bops"] == own.spent["bops"] == 64 * multiplications
    found = search_bits(qmodel, batches(), {"bops": 0.3, "bytes": 0.7}, weight_bits=(4, 8), activation_bits=(4, 8))
    plan = rebuilt(found).plan
    assert found.spent["bops"] <= 0.3 * 64 * multiplications
    assert {site: plan[site].spec.bits for site in plan} == dict(found.bits)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(torch.relu(self.conv(x)))).mean((2, 3)))


def test_bops_count_each_call_of_a_layer() -> None:
    found = search_bits(calibrated(model=Twice().eval()), batches(), {"bops": 1.0}, weight_bits=(8,))
    assert found.spent["bops"] == 64 * (2 * 36 * 3 * 27 + 3 * 4)


@pytest.mark.parametrize("computed", [prune.identity, parametrizations.weight_norm], ids=["pruned", "weight norm"])
def test_weights_that_are_computed_count(computed: Any) -> None:
    def model() -> nn.Module:
        net = Net().eval()
        computed(net.stem, "weight")
        return net

    qmodel = calibrated(model=model())
    found = search_bits(qmodel, batches(), {"weight_bits": 4, "bytes": 0.9}, weight_bits=(2, 3, 4, 6, 8))
    sizes = {
        f"{name}.weight": module.weight.numel() for name, module in Net().named_modules() if hasattr(module, "weight")
    }
    mean = sum(size * found.bits[site] for site, size in sizes.items()) / sum(sizes.values())
    assert found.spent["weight_bits"] == pytest.approx(mean) and mean <= 4
    again = sparsebit.quantize(model(), batches(), found.config)
    assert weight_bytes(again) <= found.spent["bytes"] + 1 <= found.limits["bytes"] + 1


def test_inputs_of_one_add_and_readers_of_one_tensor_are_tied() -> None:
    found = search_bits(calibrated(), batches(), {"activation_bits": 5}, weight_bits=(8,), activation_bits=(3, 4, 6, 8))
    groups: dict[str, set[int]] = {}
    for site, bits in found.bits.items():
        if ".input." in site:
            groups.setdefault(site.split(".input.")[0], set()).add(bits)
    assert all(len(group) == 1 for group in groups.values())


def test_a_runtime_wants_one_format_of_layers_that_read_one_tensor() -> None:
    config = "{BACKEND: onnxruntime, DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {DISABLE: true}}}"
    qmodel = calibrated(config)
    for limit in (4.3, 7.8):
        found = search_bits(qmodel, batches(), {"weight_bits": limit}, weight_bits=(4, 8))
        assert found.bits["left.weight"] == found.bits["right.weight"]
    assert set(found.bits.values()) == {4, 8}


def test_ties_of_the_user() -> None:
    found = search_bits(
        calibrated(),
        batches(),
        {"weight_bits": 5},
        weight_bits=(2, 4, 8),
        ties=[("blocks.*.weight",), ("left.*", "right.*")],
    )
    assert (
        len({bits for site, bits in found.bits.items() if site.startswith("blocks") and site.endswith("weight")}) == 1
    )
    with pytest.raises(ConfigError, match="globs that match sites; near names"):
        search_bits(calibrated(), batches(), {"weight_bits": 5}, ties=[("blok.0",)])


def test_what_the_config_says_of_single_layers_stays() -> None:
    config = parse_qconfig(CONFIG).replace(
        "W.SPECIFIC", [{"blocks.0.*": ["OBSERVER.TYPE", "mse"]}, {"left": ["QUANTIZER.DISABLE", True]}]
    )
    found = search_bits(calibrated(config), batches(), {"weight_bits": 3}, weight_bits=(2, 3, 4, 8))
    plan = rebuilt(found).plan
    assert plan["blocks.0.conv1.weight"].observer == "mse" and plan["blocks.1.conv1.weight"].observer == "minmax"
    assert "left.weight" not in plan and "left.weight" not in found.bits


def test_costs_of_ones_own() -> None:
    qmodel = calibrated()
    slow = {site: {4: 1.0, 8: 5.0} for site in qmodel.plan if site.endswith("weight")}
    found = search_bits(qmodel, batches(), [SiteBudget("milliseconds", 4 * 1 + 3 * 5 - 0.5, slow)], weight_bits=(4, 8))
    assert sorted(found.bits[site] for site in slow) == [4, 4, 4, 4, 4, 8, 8]
    with pytest.raises(ConfigError, match="budget 'milliseconds' has a site 'nowhere'"):
        search_bits(qmodel, batches(), [SiteBudget("milliseconds", 4, {"nowhere": {8: 1.0}})])


def test_pareto_curve_measures_once() -> None:
    points = pareto_curve(calibrated(), batches(), "weight_bits", (2.5, 4, 8), weight_bits=(2, 3, 4, 8))
    losses = [point.loss for point in points]
    assert losses == sorted(losses, reverse=True) and set(points[2].bits.values()) == {8}
    assert points[0].sensitivity is points[1].sensitivity


@pytest.mark.parametrize(
    ("budgets", "error", "message"),
    [
        ({}, ConfigError, "one or more of bytes"),
        ({"megabytes": 3}, ConfigError, "allowed: one or more of bytes, weight_bits, activation_bits, bops"),
        ({"bytes": 0}, ConfigError, "limits above 0"),
        ({"weight_bits": 1}, BudgetError, "weight_bits: 1 allowed, 2 is the least"),
    ],
)
def test_budgets_without_sense(budgets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search_bits(calibrated(), batches(), budgets, weight_bits=(2, 8))


def test_budgets_and_ties_of_your_own_that_cannot_be_meant() -> None:
    qmodel, costs = calibrated(), {bits: float(bits) for bits in (2, 8)}
    own = [SiteBudget("ms", 6.0, {"stem.weight": costs}), SiteBudget("ms", 3.0, {"left.weight": costs})]
    with pytest.raises(ConfigError, match="SiteBudgets with different names"):
        search_bits(qmodel, batches(), own, weight_bits=(2, 8))
    with pytest.raises(ConfigError, match="has no cost at 4 bits"):
        search_bits(qmodel, batches(), own[:1], weight_bits=(2, 4, 8))
    with pytest.raises(ConfigError, match=r"the tie '\*.weight': allowed: a list of globs"):
        search_bits(qmodel, batches(), {"weight_bits": 4}, ties=["*.weight"])


def test_needs_data_and_weights_as_they_were() -> None:
    with pytest.raises(CalibrationError, match="no data"):
        search_bits(calibrated(), [], {"bytes": 0.5})
    rounded = calibrated(parse_qconfig(CONFIG).replace("ALGORITHMS", ["gptq"]))
    with pytest.raises(CalibrationError, match="gptq has changed the weights"):
        search_bits(rounded, batches(), {"bytes": 0.5})


def test_an_iterator_is_refused_before_its_first_batch_is_lost() -> None:
    with pytest.raises(CalibrationError, match=r"search_bits\(\) read .* more than once"):
        search_bits(calibrated(), iter(batches()), {"weight_bits": 4})
    with pytest.raises(CalibrationError, match="ranges of activations read"):
        sensitivity(calibrated(), iter(batches()), activation_bits=(4,))
    assert sensitivity(calibrated(), iter(batches())).num_samples == 24


def test_data_that_is_not_finite_is_named_as_the_cause() -> None:
    with pytest.raises(CalibrationError, match="is NaN; look for NaN and infinity in the data"):
        search_bits(calibrated(), [batches()[0] * float("nan")], {"weight_bits": 4})


def test_scores_that_are_all_zero_are_told() -> None:
    model = Net().eval()
    for head in (model.left, model.right):
        nn.init.zeros_(head.weight)
    with pytest.warns(UserWarning, match="the choice is arbitrary"):
        search_bits(calibrated(model=model), batches(), {"weight_bits": 4}, weight_bits=(2, 4), method="sqnr")


class Opaque(nn.Module):
    """Its branch depends on the data: what is inside has a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            x = x / 2
        return self.head(self.block(x).mean((2, 3)))


def test_graphs_inside_of_code_that_cannot_be_traced() -> None:
    torch.manual_seed(0)
    budgets = {"weight_bits": 5, "activation_bits": 6}
    qmodel = calibrated(model=Opaque().eval())
    found = search_bits(qmodel, batches(), budgets, weight_bits=(4, 8), activation_bits=(4, 8))
    assert {"block.conv1.weight", "head.weight", "block.add.input.1"} <= set(found.bits)
    assert {4, 8} == {bits for site, bits in found.bits.items() if site.endswith("weight")}


def test_the_facts_of_a_model_do_not_depend_on_the_order_of_its_arguments() -> None:
    facts = []
    for model, first in ((Mixed(), False), (MaskFirst(), True)):
        data = masked_batches(first=first, num_batches=1)
        qmodel = sparsebit.quantize(model, [*data, *data], CONFIG)
        facts.append(facts_of(qmodel.model, qmodel.plan, qmodel, (data[0], {})))
    counts = [{product.layer: product.num_multiplications for product in found.products} for found in facts]
    assert counts[0] == counts[1] == {"first": 5 * 6 * 8, "second": 5 * 8 * 3}
    sizes = [{name: site.num_elements for name, site in found.sites.items()} for found in facts]
    assert sizes[0] == sizes[1]


def test_the_report_adds_up() -> None:
    """Rows are of sites with a choice; the sum of scores has those of the others in it, and says so."""
    found = search_bits(calibrated(), batches(), {"bytes": 0.7}, weight_bits=(2, 4, 8))
    *rows, budget, total = str(found).splitlines()
    scores = found.sensitivity.scores
    fixed = [site for site in found.bits if len(scores[site]) == 1]
    told = re.fullmatch(r"sum of scores: (.+), of which (.+) at (\d+) sites that had no choice", total)
    assert told is not None and int(told[3]) == len(fixed) > 0
    assert float(told[2]) == pytest.approx(sum(scores[site][8] for site in fixed), rel=1e-3)
    assert float(told[1]) == pytest.approx(float(told[2]) + sum(float(row.split()[2]) for row in rows[1:]), rel=0.01)
    assert re.fullmatch(r"bytes: \d,\d{3} of \d,\d{3}", budget)
