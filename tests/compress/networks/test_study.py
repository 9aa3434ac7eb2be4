"""What rungs may measure: facts about the network, the layers that lose most, bits and channels under a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("onnxscript")
pytest.importorskip("scipy")

import sparsebit
from sparsebit.compress.networks import study as study_module
from sparsebit.compress.networks.bench import Bench
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.compress.networks.study import Study
from sparsebit.compress.networks.trial import NetworkTrials
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.sparse.budgets.model_size import model_size
from sparsebit.sparse.sparse_model import SparseModel
from tests.compress.made import FLOAT, goal, step
from tests.compress.nets import batches
from tests.compress.networks.benches import bench as made_bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return made_bench(tmp_path_factory.mktemp("bench"), "virtual")


@pytest.fixture
def study(bench: Bench, tmp_path: Path) -> Study:
    return Study(bench, tmp_path)


def test_recipes_are_read_from_what_steps_keep(study: Study) -> None:
    recipe = Recipe(as_qconfig("tensorrt"), learning_steps=7)
    assert study.recipe(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("target", "float_inputs"), [("virtual", False), ("onnxruntime", True), ("tensorrt", True), ("openvino", True)]
)
def test_4_bit_weights_have_float_inputs_where_the_target_has_no_integer_kernel(
    study: Study, target: str, float_inputs: bool
) -> None:
    config = replace(study, bench=replace(study.bench, goal=goal(target))).low_bit_config
    assert config.W.QUANTIZER.BIT == 4 and config.A.QUANTIZER.DISABLE is float_inputs


@pytest.mark.parametrize(("target", "bits"), [("virtual", (2, 4, 8)), ("onnxruntime", (2, 4, 8)), ("tensorrt", (4, 8))])
def test_the_low_bits_that_a_targets_files_store(study: Study, target: str, bits: tuple[int, ...]) -> None:
    assert replace(study, bench=replace(study.bench, goal=goal(target))).low_bits == bits


def with_model(study: Study, *layers: nn.Module) -> Study:
    return replace(study, bench=replace(study.bench, model=nn.Sequential(*layers)))


def test_which_rescaling_fits(study: Study) -> None:
    assert study.has_depthwise() and not study.has_linears()  # the only linear layer is the classifier
    convs = with_model(study, nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(1, 4, 3))
    assert not convs.has_depthwise() and not convs.has_linears()
    assert with_model(study, nn.Conv1d(4, 8, 3, groups=4)).has_depthwise()
    assert with_model(study, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).has_linears()


def test_learning_has_a_quarter_of_the_time_by_the_models_size(study: Study) -> None:
    def steps(macs: int, minutes: float) -> int:
        return replace(study, bench=replace(study.bench, float_cost=replace(FLOAT, macs=macs))).learning_steps(minutes)

    assert steps(int(1e9), 20.0) == int(300 * 4e10 / (2e9 * 4 * 32)) == 46
    assert steps(int(5e8), 20.0) == 93 and steps(int(1e9), 40.0) == 93
    assert steps(0, 20.0) == steps(1000, 20.0) == 2000


def test_the_layers_that_cost_the_most_accuracy(study: Study) -> None:
    rough = {"conv2": ["QUANTIZER.BIT", 2]}
    recipe = Recipe(as_qconfig("virtual").replace("W.SPECIFIC", [rough]))
    (study.root / "candidates" / "01-rough").mkdir(parents=True)
    begun = step("01-rough", recipe=recipe)
    made = NetworkTrials(study.bench).made(recipe, begun, study.root / begun.folder, None)
    names = study.worst_layers(made)
    assert names[0] == "conv2" and set(names) <= {"conv1", "deep", "conv2", "head"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "load", None)  # the folder has the answer: nothing is measured again
        assert study.worst_layers(made) == names


@pytest.mark.parametrize("share", [0.17, 0.2])
def test_bits_under_a_share_of_the_weights_bytes(study: Study, share: float) -> None:
    config = study.low_bit_config.replace("ALGORITHMS", ["gptq"])
    found = study.bits_under(config, share, (4, 8))
    assert [entry.name for entry in found.ALGORITHMS] == ["gptq"]
    qmodel = sparsebit.quantize(study.bench.model, study.bench.calibration, found.replace("ALGORITHMS", []))
    weights = [one for one in qmodel.coverage.parameters if one.is_quantized]
    used = sum(one.bytes for one in weights) / sum(one.float_bytes for one in weights)
    bits = {entry.spec.bits for name, entry in qmodel.plan.items() if name.endswith(".weight")}
    assert used <= share and bits == {4, 8}


def test_channels_and_bits_under_a_share_of_the_models_bytes(study: Study) -> None:
    found = study.channels_and_bits(study.low_bit_config.replace("ALGORITHMS", ["gptq"]), 0.12, (4, 8))
    assert found.spent["bytes"] <= 0.12 and max(found.ratios.values()) > 0 and not found.qconfig.ALGORITHMS


def test_channels_under_a_share_of_the_multiplications(study: Study) -> None:
    sconfig, round_to = study.channels({"macs": 0.6})
    smodel = SparseModel(study.bench.model, sconfig, batches(32, 3)[0]).eval()
    smodel.calc_params(study.bench.calibration)
    macs = model_size(smodel.shrink(round_to), batches(1, 3)[0]).macs
    assert round_to in (1, 8, 16)
    assert 0.3 * study.bench.float_cost.macs < macs <= 0.6 * study.bench.float_cost.macs


def test_what_is_measured_stays_on_the_cpu(study: Study, asks_for_a_gpu: None) -> None:
    config, calibration = study.low_bit_config, study.bench.calibration
    study.bits_under(config, 0.2, (4, 8))
    study.channels_and_bits(config, 0.2, (4, 8))
    sconfig, _ = study.channels({"macs": 0.6})
    recipe = Recipe(config, sconfig=sconfig, learning_steps=2)
    qmodel = recipe.quantized(recipe.net(study.bench.model, calibration), calibration, 0.0)
    assert qmodel.device.type == "cpu"
