"""`SparseModel`: exact ratios, zeros that stay, steps, what is spared, and smaller models."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.sparse import (
    Evidence,
    SparseModel,
    SparseOpr,
    Sparser,
    load,
    register_criterion,
    register_smodule,
    register_sparser,
    save,
    scale_penalty,
)
from sparsebit.sparse.scoring.criteria import CRITERIA
from tests.sparse.nets import Attention, Caching, Chain, Concat, Depthwise, Residual, Transformer, images, rows


def config(**sparser: object) -> dict[str, object]:
    return {"DEVICE": "cpu", "SPARSER": sparser}


def unstructured(**options: object) -> dict[str, object]:
    return config(**{"TYPE": "unstructed", "STRATEGY": "l1norm", "RATIO": 0.5, **options})


def structured(**options: object) -> dict[str, object]:
    return config(**{"TYPE": "structed", "STRATEGY": "l1norm", "RATIO": 0.5, **options})


def loss(outputs: Tensor, batch: Tensor) -> Tensor:
    return outputs.square().mean()


def test_elements_are_pruned_exactly_and_the_smallest_go() -> None:
    model = Chain()
    smodel = SparseModel(model, unstructured(RATIO=0.3))
    smodel.calc_params()
    for name in ("a", "b", "head"):
        weight, before = getattr(smodel.model, name).weight, getattr(model, name).weight
        assert int((weight == 0).sum()) == int(0.3 * weight.numel() + 0.5)
        assert before[weight == 0].abs().max() <= before[weight != 0].abs().min()
        assert torch.equal(getattr(smodel.model, name).bias, getattr(model, name).bias)


def test_a_global_ratio_holds_over_all_layers() -> None:
    model = Chain()
    with torch.no_grad():
        model.head.weight.mul_(100)
    smodel = SparseModel(model, unstructured(SCOPE="global", SPECIFIC=[{"b": ["RATIO", 0.25]}]))
    smodel.calc_params()
    assert int((~smodel.masks["b.weight"]).sum()) == smodel.masks["b.weight"].numel() // 4
    others = [smodel.masks[name] for name in ("a.weight", "head.weight")]
    assert sum(int((~mask).sum()) for mask in others) == sum(mask.numel() for mask in others) // 2
    assert smodel.sparsity["a.weight"] == 1.0


@pytest.mark.parametrize("granularity", ["2:4", "4:8", "1:4"])
def test_n_of_m(granularity: str) -> None:
    n, m = map(int, granularity.split(":"))
    smodel = SparseModel(Chain(), config(TYPE="unstructured", GRANULARITY=granularity, SPARE=["a"]))
    smodel.calc_params()
    kept = (smodel.model.head.weight != 0).unflatten(1, (-1, m)).sum(-1)
    assert kept.eq(n).all() and (smodel.model.a.weight != 0).all()


def test_blocks() -> None:
    smodel = SparseModel(Chain(), unstructured(GRANULARITY="4x1"))
    smodel.calc_params()
    blocks = (smodel.model.a.weight.flatten(1) != 0).unflatten(0, (-1, 4)).sum(1)
    assert set(blocks.unique().tolist()) == {0, 4}


@pytest.mark.sample(6)
@pytest.mark.parametrize("strategy", sorted(CRITERIA))
@pytest.mark.parametrize("kind", ["structured", "unstructured"])
def test_every_criterion(strategy: str, kind: str) -> None:
    batches = [images(), images()]
    smodel = SparseModel(Chain(), config(TYPE=kind, STRATEGY=strategy, RATIO=0.5), images())
    if strategy == "slimming":  # the second group has no norm
        smodel = SparseModel(Concat(), config(TYPE=kind, STRATEGY=strategy, RATIO=0.5), images())
        if kind == "unstructured":
            with pytest.raises(ConfigError, match=r"slimming does not judge stem\.weight"):
                smodel.calc_params()
            return
    smodel.calc_params(batches, loss)
    if kind == "structured":
        assert len(smodel.dead_units()) == len(smodel.groups.units) // 2
        small = smodel.shrink()
        assert torch.allclose(small.eval()(batches[0]), smodel.eval()(batches[0]), atol=1e-5)
    else:
        assert all(abs(share - 0.5) < 0.02 for share in smodel.sparsity.values())


def test_wanda_prefers_weights_of_large_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.ones_(model[0].weight)
    smodel = SparseModel(model, unstructured(STRATEGY="wanda"))
    smodel.calc_params([torch.tensor([[1.0, 9.0, 2.0, 8.0]])])
    assert (smodel.model[0].weight != 0).tolist() == [[False, True, False, True]] * 3


def test_data_that_is_missing_is_asked_for() -> None:
    with pytest.raises(CalibrationError, match="wanda needs data"):
        SparseModel(Chain(), unstructured(STRATEGY="wanda")).calc_params()
    with pytest.raises(CalibrationError, match="loss"):
        SparseModel(Chain(), unstructured(STRATEGY="taylor")).calc_params([images()])


@pytest.mark.parametrize("make", [structured, unstructured])
def test_zeros_stay_in_training(make: object) -> None:
    smodel = SparseModel(Chain(), make(), images())  # type: ignore[operator]
    optimizer = torch.optim.AdamW(smodel.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        if step == 1:  # after a step, so that the optimizer has moments of weights that are pruned now
            smodel.calc_params()
        optimizer.zero_grad()
        smodel(images()).square().mean().backward()
        optimizer.step()
    smodel.eval()
    for name, mask in smodel.masks.items():
        weight = smodel.model.get_parameter(name)
        assert (weight[~mask] == 0).all() and (~mask).any() and (weight[mask] != 0).any()
        assert (weight.grad[~mask] == 0).all()


def test_masks_are_in_the_state() -> None:
    smodel = SparseModel(Chain(), structured(), images())
    smodel.calc_params()
    other = SparseModel(Chain(), structured(), images())
    other.load_state_dict(smodel.state_dict())
    assert all(torch.equal(mask, other.masks[name]) for name, mask in smodel.masks.items())
    batch = images()
    assert torch.equal(other.eval()(batch), smodel.eval()(batch))
    assert torch.allclose(other.shrink().eval()(batch), smodel(batch), atol=1e-5)
    assert torch.equal(copy.deepcopy(smodel)(batch), smodel(batch))


def test_a_cubic_schedule_only_adds_zeros() -> None:
    scheduled = {**unstructured(RATIO=0.8), "SCHEDULE": {"TYPE": "cubic", "STEPS": 2}}
    smodel = SparseModel(Chain(), scheduled)
    smodel.calc_params()
    first = smodel.masks["head.weight"].clone()
    assert abs(smodel.sparsity["head.weight"] - 0.7) < 0.01
    with torch.no_grad():
        smodel.model.head.weight.copy_(torch.randn_like(smodel.model.head.weight))
    smodel.calc_params()
    assert abs(smodel.sparsity["head.weight"] - 0.8) < 0.01
    assert not smodel.masks["head.weight"][~first].any()


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("strategy", ["l1norm", "random"])
def test_steps_only_add_channels(strategy: str, scope: str) -> None:
    """Scores change from step to step (training, a random criterion): what is gone stays gone."""
    torch.manual_seed(0)
    scheduled = {**structured(RATIO=0.75, STRATEGY=strategy, SCOPE=scope), "SCHEDULE": {"TYPE": "linear", "STEPS": 3}}
    smodel = SparseModel(Chain(), scheduled, images())
    total = len(smodel.groups.units)
    gone: set[int] = set()
    for step in range(1, 5):  # a step after the last one changes nothing
        smodel.calc_params()
        now = {unit.label for unit in smodel.dead_units()}
        assert gone <= now and abs(len(now) - min(1.0, step / 3) * 0.75 * total) <= len(smodel.groups.groups)
        gone = now
        with torch.no_grad():  # as training would: other weights are the small ones now
            for parameter in smodel.model.parameters():
                parameter.copy_(torch.randn_like(parameter))


def test_rewinding_keeps_the_masks() -> None:
    model = Chain()
    start = copy.deepcopy(model.state_dict())
    smodel = SparseModel(model, unstructured())
    with torch.no_grad():
        smodel.model.a.weight.mul_(-3)
    smodel.calc_params()
    smodel.rewind(start)
    mask = smodel.masks["a.weight"]
    assert (
        torch.equal(smodel.model.a.weight[mask], start["a.weight"][mask]) and (smodel.model.a.weight[~mask] == 0).all()
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [Chain, Residual, Concat, Depthwise])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_shrunk_model_is_the_masked_one(kind: type[nn.Module], scope: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    smodel = SparseModel(kind(), structured(RATIO=0.4, SCOPE=scope), images()).eval()
    smodel.calc_params()
    batch = images()
    small = smodel.shrink()
    assert type(small) is kind and not [name for name in small.state_dict() if name.endswith("_mask")]
    assert torch.allclose(small(batch), smodel(batch), atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in smodel.model.parameters())
    save(small, tmp_path / "small")
    assert torch.equal(load(tmp_path / "small", kind()).eval()(batch), small(batch))
    small.train()(batch).sum().backward()


def test_values_that_a_model_keeps_from_run_to_run_are_computed_anew() -> None:
    """What was cached before has the old widths and the old weights."""
    batch = images()
    smodel = SparseModel(Caching(), structured(), batch).eval()
    assert smodel.groups.groups
    smodel(batch)
    smodel.calc_params()
    masked = smodel(batch)
    small = smodel.shrink()
    assert small.a.out_channels == 4
    assert torch.allclose(small(batch), masked, atol=1e-5)
    assert torch.allclose(smodel.masked_model().eval()(batch), masked, atol=1e-5)


def test_widths_are_rounded_to_a_multiple() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    smodel = SparseModel(model, structured(RATIO=0.4), rows()).eval()
    smodel.calc_params()
    assert len(smodel.dead_units()) == 13
    small, batch = smodel.shrink(round_to=8), rows()
    assert small[0].out_features == small[2].in_features == 24
    assert torch.allclose(small(batch), smodel(batch), atol=1e-5)


@pytest.mark.parametrize(("granularity", "heads", "neurons"), [("head", 2, 20), ("neuron", 4, 10), ("channel", 2, 10)])
def test_heads_and_neurons(granularity: str, heads: int, neurons: int) -> None:
    smodel = SparseModel(Transformer(), structured(GRANULARITY=granularity), torch.randn(2, 5, 6))
    smodel.calc_params()
    small = smodel.shrink()
    assert (small.attention.num_heads, small.up.out_features) == (heads, neurons)


def test_layers_can_be_spared() -> None:
    smodel = SparseModel(Chain(), structured(SPARE=["a"], SPECIFIC=[{"b": ["RATIO", 0.25]}]), images())
    smodel.calc_params()
    small = smodel.shrink()
    assert (small.a.out_channels, small.b.out_channels) == (8, 4)


def test_layers_before_an_addition_can_be_left_alone() -> None:
    for make in (structured, unstructured):
        smodel = SparseModel(Residual(), make(), images())
        smodel.disable_sparse_before_add()
        smodel.calc_params()
        zeros = {
            name: bool((smodel.model.get_parameter(f"{name}.weight") == 0).any(3).any(2).all(1).any())
            for name in ("stem", "b")
        }
        assert zeros == {"stem": False, "b": False}
        assert smodel.sparsity["a.weight"] > 0.4


def test_a_missing_example_is_guessed() -> None:
    smodel = SparseModel(Residual(), structured())
    smodel.calc_params()
    assert smodel.shrink().a.out_channels == 5


def test_unstructured_models_are_not_shrunk() -> None:
    with pytest.raises(ConfigError, match="set TYPE: structured"):
        SparseModel(Chain(), unstructured()).shrink()


def test_own_criteria_sparsers_and_modules() -> None:
    @register_criterion("largest")
    def largest(evidence: Evidence) -> Tensor | None:
        return -evidence.weight.abs() if evidence.is_matrix else None

    @register_sparser("checkered")
    class Checkered(Sparser):
        def calc_mask(self, x: Tensor) -> Tensor:
            assert self.ratio == 0.5
            return torch.arange(x.numel()).view_as(x) % 2

    @register_smodule(sources=[nn.Bilinear])
    class SBilinear(SparseOpr):
        weights = ("weight",)

    model = Chain()
    smodel = SparseModel(model, unstructured(STRATEGY="Largest"))
    smodel.calc_params()
    weight = model.a.weight.detach().abs()
    assert weight[~smodel.masks["a.weight"]].min() >= weight[smodel.masks["a.weight"]].max()
    smodel = SparseModel(nn.Bilinear(4, 4, 4), config(TYPE="checkered", RATIO=0.5))
    smodel.calc_params()
    assert (smodel.model.weight.flatten()[::2] == 0).all() and (smodel.model.weight.flatten()[1::2] != 0).all()


def test_the_penalty_of_slimming() -> None:
    model = Chain()
    assert scale_penalty(model).item() == 8.0
    assert scale_penalty(nn.Linear(2, 2)).item() == 0.0


def test_export(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    smodel = SparseModel(Chain(), structured(), images()).eval()
    smodel.calc_params()
    batch = images()
    smodel.export_onnx(batch, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0]
    assert torch.allclose(torch.from_numpy(found), smodel(batch), atol=1e-5)


def test_the_original_is_left_alone() -> None:
    model = Attention()
    before = copy.deepcopy(model.state_dict())
    SparseModel(model, structured(), torch.randn(2, 5, 12)).calc_params()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{"RATIO": 0.5}, {"GRANULARITY": "2:4"}, {"RATIO": 0.5, "SCOPE": "global"}])
@pytest.mark.parametrize("strategy", ["obs", "sparsegpt"])
def test_weights_take_up_what_is_removed(strategy: str, options: dict[str, object]) -> None:
    """Against the same share of zeros by magnitude, the outputs of each layer stay nearer."""
    model = nn.Sequential(nn.Linear(12, 16))
    batches = [torch.randn(64, 12) @ torch.randn(12, 12) for _ in range(2)]
    errors = {}
    for name in ("l1norm", strategy):
        smodel = SparseModel(model, config(TYPE="unstructured", STRATEGY=name, **options))
        smodel.calc_params(batches)
        errors[name] = sum(float((smodel(x) - model(x)).detach().square().sum()) for x in batches)
        assert abs(smodel.sparsity["0.weight"] - 0.5) < 1e-6
    assert errors[strategy] < 0.8 * errors["l1norm"]


def test_channels_that_are_silent_or_flat_go_first() -> None:
    model = Chain()
    with torch.no_grad():
        model.bn.bias[:] = 0.5
        model.bn.bias[3] = -50.0  # never above zero
    smodel = SparseModel(
        model, config(TYPE="structured", STRATEGY="apoz", RATIO=0.125, SPARE=["head"]), images()
    ).eval()
    smodel.calc_params([images()])
    assert not smodel.masks["a.weight"][3].any()
    model = Chain()
    with torch.no_grad():
        model.bn.weight[5] = 0.0  # a constant map
        model.bn.bias[5] = 0.0
    smodel = SparseModel(
        model, config(TYPE="structured", STRATEGY="hrank", RATIO=0.125, SPARE=["head"]), images()
    ).eval()
    smodel.calc_params([images()])
    assert not smodel.masks["a.weight"][5].any()


@pytest.mark.parametrize("kind", ["structured", "unstructured"])
def test_a_model_that_was_made_in_inference_mode_can_be_trained(kind: str) -> None:
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 6)
        smodel = SparseModel(model, config(TYPE=kind, STRATEGY="l1norm", RATIO=0.5), x)
        smodel.calc_params()
    smodel.train()
    smodel(torch.randn(4, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in smodel.parameters())
