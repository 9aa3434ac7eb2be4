"""What each rung proposes, and when it has nothing to add, from ladders that are made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparsebit.compress.climbing.known import Candidate, Known
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.compress.networks.rungs import RUNGS
from sparsebit.config.schema import QuantConfig
from sparsebit.quantization.effort import with_effort
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records.ladder import LadderGoal, LadderStep
from sparsebit.sparse.sparse_config import parse_sconfig
from tests.compress.made import Study, goal, step

EIGHT = Recipe(as_qconfig("onnxruntime"))
LOW = EIGHT.config.replace("A.QUANTIZER.DISABLE", True).replace("W.QUANTIZER.BIT", 4)
FOUR = Recipe(with_effort(LOW, "good"))
PRUNED = EIGHT.replace(sconfig=parse_sconfig("{SPARSER: {TYPE: structured, RATIO: 0.25}}"))
LOSING: dict[str, Any] = {"loss": 3.0, "verdict": "too much loss"}
SMALL = goal(prefer="bytes")


def known(*steps: LadderStep, wanted: LadderGoal | None = None, study: Study | None = None) -> Known:
    return Known(wanted or goal(), steps, study or Study(low_bit_config=LOW), 600.0)


def proposed(rung: str, *steps: LadderStep, **more: Any) -> Candidate | None:
    return RUNGS.get(rung).propose(known(*steps, **more))


def algorithms(candidate: Candidate | None) -> list[str]:
    assert candidate is not None and isinstance(candidate.recipe, Recipe)
    return [entry.name for entry in candidate.recipe.config.ALGORITHMS]


def observers(config: QuantConfig) -> tuple[str, str]:
    return config.W.OBSERVER.TYPE, config.A.OBSERVER.TYPE


W8 = step("01-w8", recipe=EIGHT)
LOSES = step("01-w8", recipe=EIGHT, **LOSING)


def test_all_rungs_have_their_tests_here() -> None:
    order = sorted((RUNGS.get(name) for name in RUNGS.names()), key=lambda rung: rung.order)
    assert [rung.name for rung in order] == [
        "eight bits", "measured placement", "ranges", "rescaling", "float layers",
        "four bits", "mixed bits", "channels and bits", "channels", "learning",
    ]  # fmt: skip


@pytest.mark.parametrize("rung", [name for name in RUNGS.names() if name != "eight bits"])
def test_nothing_is_proposed_before_the_first_candidate(rung: str) -> None:
    assert proposed(rung) is None and proposed(rung, wanted=goal(budget={"bytes": 0.3, "macs": 0.5})) is None


@pytest.mark.parametrize("rung", RUNGS.names())
def test_a_failed_first_candidate_ends_no_rung_with_an_error(rung: str) -> None:
    failed = step("01-w8", recipe=EIGHT, loss=None, verdict="failed", cost=None, fault="no kernel")
    for wanted in (goal(), SMALL, goal(budget={"bytes": 0.1}), goal(budget={"latency": 0.4}, max_loss=1.0)):
        found = proposed(rung, failed, wanted=wanted)
        assert found is None or rung == "four bits"


def test_eight_bits_come_first_and_once() -> None:
    found = proposed("eight bits", wanted=goal("tensorrt"))
    assert found is not None and found.name == "w8" and found.recipe == Recipe(as_qconfig("tensorrt"))
    assert proposed("eight bits", W8) is None


def test_eight_bits_are_left_out_if_they_cannot_fit() -> None:
    small = goal(budget={"bytes": 0.12})
    assert proposed("eight bits", wanted=small) is None
    four = proposed("four bits", wanted=small)
    assert four is not None and four.name == "w4-nearest" and not algorithms(four)  # for its size alone
    assert proposed("eight bits", wanted=goal(budget={"bytes": 0.3})) is not None
    assert proposed("eight bits", wanted=goal(budget={"bytes": 0.12, "macs": 0.5})) is not None  # its time is needed


class TestMeasuredPlacement:
    def test_for_latency_on_a_target_that_runs_here(self) -> None:
        for wanted in (goal(), goal(budget={"latency": 0.5})):
            found = proposed("measured placement", W8, wanted=wanted)
            assert found is not None and found.recipe == EIGHT.replace(placement="measured")
            assert found.name == "w8-placed" and "01-w8 may be slower" in found.why

    def test_not_for_size_nor_elsewhere_nor_twice_nor_for_what_loses(self) -> None:
        placed = EIGHT.replace(placement="measured")
        assert proposed("measured placement", W8, wanted=SMALL) is None
        assert proposed("measured placement", W8, wanted=goal("tensorrt")) is None
        assert proposed("measured placement", step("02-w8-placed", recipe=placed)) is None
        assert proposed("measured placement", LOSES) is None


class TestRanges:
    def test_mse_then_percentile_of_activations(self) -> None:
        first = proposed("ranges", LOSES)
        assert first is not None and isinstance(first.recipe, Recipe)
        assert first.name == "w8-mse" and observers(first.recipe.config) == ("mse", "mse")
        assert "loses 3.00" in first.why
        worse = step("02-w8-mse", "ranges", first.recipe, loss=4.0, verdict="too much loss")
        second = proposed("ranges", LOSES, worse)
        assert second is not None and isinstance(second.recipe, Recipe) and second.name == "w8-percentile"
        assert observers(second.recipe.config) == (EIGHT.config.W.OBSERVER.TYPE, "percentile")
        assert proposed("ranges", LOSES, worse, step("03", "ranges", second.recipe, **LOSING)) is None

    def test_only_if_more_accuracy_is_wanted(self) -> None:
        budget = goal(budget={"bytes": 0.5})
        assert proposed("ranges", W8) is None
        assert proposed("ranges", W8, wanted=budget) is not None
        assert proposed("ranges", step("01-w8", recipe=EIGHT, loss=0.0), wanted=budget) is None
        assert proposed("ranges", step("01-w8", recipe=EIGHT, loss=None, verdict="over budget"), wanted=budget) is None


class TestRescaling:
    def test_smoothing_for_linears_and_equalization_for_depthwise(self) -> None:
        both = Study(linears=True, depthwise=True)
        first = proposed("rescaling", LOSES, study=both)
        assert algorithms(first) == ["smooth"]
        tried = step("02-w8-smooth", "rescaling", first.recipe, loss=4.0, verdict="too much loss")  # type: ignore[union-attr,arg-type]
        assert algorithms(proposed("rescaling", LOSES, tried, study=both)) == ["equalize"]
        better = step("02-w8-smooth", "rescaling", first.recipe, loss=2.0, verdict="too much loss")  # type: ignore[union-attr,arg-type]
        assert algorithms(proposed("rescaling", LOSES, better, study=both)) == ["equalize", "smooth"]
        assert proposed("rescaling", LOSES, tried, study=Study(linears=True)) is None
        assert algorithms(proposed("rescaling", LOSES, study=Study(depthwise=True))) == ["equalize"]

    def test_not_where_it_does_not_apply(self) -> None:
        float_inputs = Recipe(EIGHT.config.replace("A.QUANTIZER.DISABLE", True))
        both = Study(linears=True, depthwise=True)
        assert proposed("rescaling", LOSES, study=Study()) is None
        assert proposed("rescaling", W8, study=both) is None
        assert proposed("rescaling", step("01-w8", recipe=float_inputs, **LOSING), study=both) is None


class TestFloatLayers:
    def test_one_then_two_then_four_of_the_worst(self) -> None:
        study, steps = Study(worst=("a", "b", "c")), [LOSES]
        for count in (1, 2, 3):  # the third asks for 4 of 3
            found = proposed("float layers", *steps, study=study)
            assert found is not None and isinstance(found.recipe, Recipe) and found.name == f"w8-float{count}"
            for part in (found.recipe.config.W, found.recipe.config.A):
                assert [entry.to_entry() for entry in part.SPECIFIC] == [
                    {name: ["QUANTIZER.DISABLE", True]} for name in ("a", "b", "c")[:count]
                ]
            steps.append(step(f"0{count + 1}-{found.name}", "float layers", found.recipe, **LOSING))
        assert proposed("float layers", *steps, study=study) is None

    def test_it_begins_with_the_candidate_of_least_loss(self) -> None:
        study = Study(worst=("a",))
        better = step("02-w8-mse", "ranges", EIGHT, loss=2.0, verdict="too much loss")
        found = proposed(
            "float layers", LOSES, better, step("03-w8-percentile", "ranges", EIGHT, **LOSING), study=study
        )
        assert study.asked == ["02-w8-mse"] and found is not None and found.name == "w8-mse-float1"

    def test_a_measured_placement_is_dropped(self) -> None:
        placed = EIGHT.replace(placement="measured")
        found = proposed("float layers", step("01-w8", recipe=placed, **LOSING), study=Study(worst=("a",)))
        assert found is not None and found.recipe.placement == "default"  # type: ignore[attr-defined]

    def test_not_with_a_budget_alone_nor_without_layers_that_lose(self) -> None:
        study = Study(worst=("a", "b", "c"))
        assert proposed("float layers", W8, study=study) is None
        assert proposed("float layers", W8, wanted=goal(budget={"bytes": 0.5}), study=study) is None
        assert proposed("float layers", LOSES, study=Study()) is None


class TestFourBits:
    def test_gptq_then_reconstruction(self) -> None:
        first = proposed("four bits", W8, wanted=SMALL)
        assert first is not None and isinstance(first.recipe, Recipe) and "gptq" in algorithms(first)
        assert first.recipe.config.W.QUANTIZER.BIT == 4
        losing = step("02-w4-gptq", "four bits", first.recipe, **LOSING)
        second = proposed("four bits", W8, losing, wanted=SMALL)
        assert "reconstruct" in algorithms(second) and "02-w4-gptq loses 3.00" in second.why  # type: ignore[union-attr]
        assert proposed("four bits", W8, losing, step("03", "four bits", **LOSING), wanted=SMALL) is None

    def test_rounding_to_nearest_where_gptq_fails(self) -> None:
        failed = step("01-w4-gptq", "four bits", FOUR, loss=None, verdict="failed", cost=None, fault="no graph")
        found = proposed("four bits", failed, wanted=SMALL)
        assert found is not None and found.name == "w4-nearest" and not algorithms(found)
        assert proposed("four bits", failed, failed, wanted=SMALL) is None

    def test_reconstruction_only_if_it_may_help(self) -> None:
        within = step("02-w4-gptq", "four bits", FOUR)
        over = step("02-w4-gptq", "four bits", FOUR, loss=None, verdict="over budget")
        too_large = step("01-w8", recipe=EIGHT, loss=None, verdict="over budget")
        tight = goal(budget={"bytes": 0.2})
        assert proposed("four bits", W8, within, wanted=SMALL) is None
        assert proposed("four bits", too_large, within, wanted=tight) is not None
        assert proposed("four bits", too_large, over, wanted=tight) is None

    def test_only_if_bytes_are_asked_for_and_8_bits_are_too_many(self) -> None:
        assert proposed("four bits", W8) is None
        assert proposed("four bits", LOSES) is None
        assert proposed("four bits", W8, wanted=goal(budget={"bytes": 0.5})) is None
        too_large = step("01-w8", recipe=EIGHT, loss=None, verdict="over budget")
        assert proposed("four bits", too_large, wanted=goal(budget={"bytes": 0.2})) is not None


class TestMixedBits:
    FOUR_LOSES = step("02-w4", "four bits", FOUR, size=0.145, **LOSING)
    FOUR_KEEPS = step("02-w4", "four bits", FOUR, size=0.145)
    GRAPH = 0.145 - 0.125  # of the file, beside the weights

    def asked(
        self,
        *tried: LadderStep,
        four: LadderStep = FOUR_LOSES,
        wanted: LadderGoal = SMALL,
        bits: tuple[int, ...] = (4, 8),
    ) -> float | None:
        """The share of the file's bytes that it asks for, with 4 bits at 0.145 and 8 at 0.3 of the float file's."""
        study = Study(low_bit_config=LOW, low_bits=bits)
        found = proposed("mixed bits", step("01-w8", recipe=EIGHT, size=0.3), four, *tried, wanted=wanted, study=study)
        assert (found is None) == (not study.asked)
        if found is None:
            return None
        assert "gptq" in algorithms(found)
        return round(float(study.asked[0]) + self.GRAPH, 4)

    def test_a_bisection_between_4_and_8_bits(self) -> None:
        assert self.asked() == round((0.145 + 0.3) / 2, 4)
        within = step("03", "mixed bits", FOUR, size=0.22)
        assert self.asked(within) == round((0.145 + 0.22) / 2, 4)
        losing = step("04", "mixed bits", FOUR, size=0.18, **LOSING)
        assert self.asked(within, losing) == round((0.18 + 0.22) / 2, 4)

    def test_below_4_bits_if_they_keep_the_loss_and_the_target_has_2(self) -> None:
        two = 0.145 - 2 / 32
        assert self.asked(four=self.FOUR_KEEPS) is None
        assert self.asked(four=self.FOUR_KEEPS, bits=(2, 4, 8)) == round((two + 0.145) / 2, 4)
        losing = step("03", "mixed bits", FOUR, size=0.11, **LOSING)
        assert self.asked(losing, four=self.FOUR_KEEPS, bits=(2, 4, 8)) == round((0.11 + 0.145) / 2, 4)
        assert self.asked(bits=(2, 4, 8)) == self.asked()

    def test_a_budget_is_used_whole(self) -> None:
        wanted = goal(budget={"bytes": 0.2})
        assert self.asked(wanted=wanted) == 0.2 == self.asked(wanted=goal(budget={"bytes": 200_000.0}))
        assert self.asked(step("03", "mixed bits", FOUR, size=0.198), wanted=wanted) is None
        assert self.asked(step("03", "mixed bits", FOUR, size=0.18), wanted=wanted) == round(0.2 + 0.9 * 0.02, 4)
        for limit in (0.1, 0.4):  # below 4 bits, above 8
            assert self.asked(wanted=goal(budget={"bytes": limit})) is None
        assert self.asked(wanted=goal(budget={"bytes": 0.1}), bits=(2, 4, 8)) == 0.1

    def test_each_try_above_the_budget_asks_for_less(self) -> None:
        wanted, tried, shares = goal(budget={"bytes": 0.2}), list[LadderStep](), list[float]()
        for size in (0.22, 0.205, 0.203):
            share = self.asked(*tried, wanted=wanted)
            assert share is not None
            shares.append(share)
            tried.append(step("03", "mixed bits", FOUR, size=size, loss=None, verdict="over budget"))
        assert shares == sorted(shares, reverse=True) and len(set(shares)) == 3

    def test_without_gptq_where_it_fails(self) -> None:
        failed = step("01-w4-gptq", "four bits", FOUR, loss=None, verdict="failed", cost=None, fault="no graph")
        study = Study(low_bit_config=LOW, low_bits=(4, 8))
        for before, names in (((), ["gptq"]), ((failed,), [])):
            found = proposed(
                "mixed bits", W8, *before, self.FOUR_LOSES, wanted=goal(budget={"bytes": 0.2}), study=study
            )
            assert algorithms(found) == names

    def test_not_after_four_tries(self) -> None:
        failed = [step(f"0{place}", "mixed bits", FOUR, size=0.2, **LOSING) for place in range(3, 7)]
        assert self.asked(*failed[:3]) is not None and self.asked(*failed) is None


class TestChannelsAndBits:
    JOINT = SimpleNamespace(qconfig=LOW, sconfig=PRUNED.sconfig)
    GRAPH = 0.145 - 0.125

    def asked(self, *tried: LadderStep, limit: float = 0.1) -> float | None:
        study = Study(low_bit_config=LOW, joint=self.JOINT)
        steps = (W8, step("02-w4", "four bits", FOUR, size=0.145, loss=None, verdict="over budget"), *tried)
        found = proposed("channels and bits", *steps, wanted=goal(budget={"bytes": limit}), study=study)
        if found is None:
            return None
        assert isinstance(found.recipe, Recipe) and found.recipe.sconfig == self.JOINT.sconfig
        assert "gptq" in algorithms(found)
        return round(float(study.asked[0]), 4)

    def tried(self, size: float) -> LadderStep:
        return step("03", "channels and bits", PRUNED, size=size)

    def test_the_weights_share_of_the_budget_first_then_nearer_to_it(self) -> None:
        first = self.asked()
        assert first == round(0.1 - self.GRAPH, 4) == self.asked(limit=100_000)
        assert self.asked(self.tried(0.12)) == round(first - 0.02 * 1.1, 4)
        assert self.asked(self.tried(0.09)) == round(first + 0.01 * 0.9, 4)
        assert self.asked(self.tried(0.12), self.tried(0.09)) == round(first - 0.02 * 1.1 + 0.01 * 0.9, 4)

    def test_not_once_the_budget_is_used_nor_after_three_tries_nor_for_loose_budgets(self) -> None:
        assert self.asked(self.tried(0.0995)) is None
        assert self.asked(*[self.tried(0.12)] * 3) is None
        assert self.asked(limit=0.145 * 1.6) is None
        assert self.asked(limit=0.145 * 1.4) is not None

    def test_only_for_a_budget_of_bytes(self) -> None:
        four = step("02-w4", "four bits", FOUR, size=0.145)
        study = Study(low_bit_config=LOW, joint=self.JOINT)
        assert proposed("channels and bits", W8, four, wanted=SMALL, study=study) is None
        assert proposed("channels and bits", W8, wanted=goal(budget={"bytes": 0.1}), study=study) is None


class TestChannels:
    def asked(self, budget: dict[str, float], *tried: LadderStep, **first: Any) -> dict[str, float] | None:
        study = Study()
        eight = step("01-w8", recipe=EIGHT, loss=None, verdict="over budget", **first)
        found = proposed("channels", eight, *tried, wanted=goal(budget=budget), study=study)
        if found is None:
            return None
        assert isinstance(found.recipe, Recipe) and found.recipe.config == EIGHT.config
        assert found.recipe.sconfig == PRUNED.sconfig and found.recipe.round_to == 8
        return dict(study.asked[0])

    def test_the_rest_of_the_way_to_the_budget(self) -> None:
        assert self.asked({"macs": 0.5}) == {"macs": pytest.approx(0.5 * 0.97)}
        assert self.asked({"macs": 5000.0}) == {"macs": pytest.approx(0.5 * 0.97)}
        assert self.asked({"latency": 0.3}, latency=0.6) == {"latency": pytest.approx(0.5 * 0.97)}
        assert self.asked({"latency": 0.6}, latency=0.61) == {"latency": pytest.approx(0.95)}

    def test_the_tighter_of_two_budgets(self) -> None:
        assert set(self.asked({"latency": 0.3, "macs": 0.9}, latency=0.6) or {}) == {"latency"}
        assert set(self.asked({"latency": 0.5, "macs": 0.3}, latency=0.6) or {}) == {"macs"}

    def test_each_try_takes_more(self) -> None:
        over = step("02-channels", "channels", PRUNED, macs=0.52, loss=None, verdict="over budget")
        assert self.asked({"macs": 0.5}, over) == {"macs": pytest.approx(0.5 * 0.97 * 0.95)}
        assert self.asked({"macs": 0.5}, *[over] * 3) is None

    def test_not_if_the_budget_is_kept_or_is_of_bytes(self) -> None:
        assert self.asked({"latency": 0.7}, latency=0.6) is None
        assert self.asked({"bytes": 0.1}) is None


class TestLearning:
    CHANNELS = step("02-channels-0.50", "channels", PRUNED, **LOSING)

    def test_the_best_candidate_without_channels_learns(self) -> None:
        found = proposed("learning", W8, self.CHANNELS, wanted=goal(budget={"macs": 0.5}, max_loss=1.0))
        assert found is None  # the best is the one with all channels
        wanted = goal(budget={"macs": 0.5}, max_loss=1.0)
        cheap = step("02-channels-0.50", "channels", PRUNED, macs=0.5, **LOSING)
        over = step("01-w8", recipe=EIGHT, loss=None, verdict="over budget")
        found = proposed("learning", over, cheap, wanted=wanted)
        assert found is not None and found.recipe == PRUNED.replace(learning_steps=500)
        assert found.name == "channels-0.50-learned" and "in 500 steps" in found.why

    def test_not_twice_nor_for_few_steps_nor_over_the_budget(self) -> None:
        learned = step("02", "learning", PRUNED.replace(learning_steps=500), **LOSING)
        over = step("02", "channels", PRUNED, loss=None, verdict="over budget")
        assert proposed("learning", self.CHANNELS) is not None
        assert proposed("learning", learned) is None
        assert proposed("learning", over) is None
        assert proposed("learning", LOSES) is None
        assert proposed("learning", step("02", "channels", PRUNED)) is None  # it keeps the goal
        assert proposed("learning", self.CHANNELS, study=Study(steps=99)) is None
