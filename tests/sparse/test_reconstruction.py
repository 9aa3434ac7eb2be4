"""Reconstruction: pruned layers give again what the dense ones gave, and zeros stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.numerics.rounding import layer_matrix
from sparsebit.sparse import SparseModel, reestimate_norms
from tests.sparse.nets import Chain, Concat, Depthwise, Residual, Transformer, images

BATCHES = 4


def structured(**options: object) -> dict[str, object]:
    return {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": 0.4, **options}}


def unstructured(**options: object) -> dict[str, object]:
    return {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "STRATEGY": "l1norm", "RATIO": 0.5, **options}}


def error(model: nn.Module, dense: nn.Module, batches: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(float((model(x) - dense(x)).square().mean()) for x in batches)


class Branching(nn.Module):
    """A net whose code looks at values: no graph can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Conv2d(12, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        if float(x.detach().sum()) > -1e9:
            x = self.b(x).relu()
        return self.head(x.mean((2, 3)))


def correlated(count: int) -> list[Tensor]:
    """Images whose neighbouring pixels are alike, as of real ones: there is something to take up."""
    found = [torch.nn.functional.avg_pool2d(torch.randn(16, *images().shape[1:]), 3, 1, 1) for _ in range(count)]
    return [3 * batch for batch in found]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [Chain, Residual, Concat, Depthwise, Branching])
@pytest.mark.parametrize("config", [structured(), unstructured(), unstructured(GRANULARITY="2:4", RATIO=0.5)])
def test_the_outputs_come_nearer_on_other_data(kind: type[nn.Module], config: dict[str, object]) -> None:
    dense = kind().eval()
    before = copy.deepcopy(dense.state_dict())
    smodel = SparseModel(dense, config, images()).eval()
    smodel.calc_params()
    others = correlated(2)
    pruned_error = error(smodel, dense, others)
    found = smodel.reconstruct(correlated(BATCHES))
    assert found and all(fit.after <= fit.before + 1e-6 for fit in found.values())
    assert error(smodel, dense, others) < 0.8 * pruned_error
    for name, mask in smodel.masks.items():
        assert (smodel.model.get_parameter(name)[~mask] == 0).all() and (~mask).any()
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    if smodel.config.SPARSER.is_structured:
        assert torch.allclose(smodel.shrink()(others[0]), smodel(others[0]), atol=1e-5)


def test_heads_and_neurons_are_reconstructed() -> None:
    dense = Transformer().eval()
    batches = [torch.randn(8, 5, 6) @ torch.randn(6, 6) for _ in range(4)]
    smodel = SparseModel(dense, structured(RATIO=0.5), batches[0]).eval()
    smodel.calc_params()
    pruned_error = error(smodel, dense, batches)
    smodel.reconstruct(batches)
    assert error(smodel, dense, batches) < pruned_error
    assert torch.allclose(smodel.shrink()(batches[0]), smodel(batches[0]), atol=1e-5)


class Tokens(nn.Module):
    """Each token alone; padded ones are computed too. `is_flat`: tokens are the rows of one matrix."""

    def __init__(self, is_flat: bool = False) -> None:
        super().__init__()
        self.embed, self.is_flat = nn.Embedding(20, 6), is_flat
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 4)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        x = x.flatten(0, 1) if self.is_flat else x
        return self.down(self.up(x).relu()).view(*tokens.shape, -1)


@pytest.mark.slow
@pytest.mark.parametrize("is_flat", [False, True], ids=["in rows", "flat"])
def test_padded_tokens_do_not_count(is_flat: bool) -> None:
    torch.manual_seed(0)
    dense = Tokens(is_flat).eval()
    real = [torch.randint(1, 20, (8, 5)) for _ in range(4)]
    padded = [
        {
            "tokens": torch.cat([tokens, torch.zeros(8, 15, dtype=torch.long)], 1),
            "attention_mask": torch.cat([torch.ones(8, 5), torch.zeros(8, 15)], 1).long(),
        }
        for tokens in real
    ]
    found = []
    for batches in (real, padded):
        smodel = SparseModel(dense, structured(RATIO=0.5), real[0]).eval()
        smodel.calc_params()
        smodel.reconstruct(batches)
        found.append(smodel.model.down.weight.detach())
    assert torch.allclose(*found, atol=1e-5)
    ratios = [
        SparseModel(dense, structured(), real[0]).choose_ratios({"macs": 0.6}, batches[:1]).costs
        for batches in (real, padded)
    ]
    assert ratios[0] == pytest.approx(ratios[1])


def test_modes_and_gradients_stay() -> None:
    smodel = SparseModel(Chain(), unstructured(), images()).train()
    smodel.calc_params()
    smodel.reconstruct([images(), images()])
    assert smodel.model.training and all(parameter.requires_grad for parameter in smodel.model.parameters())
    smodel(images()).sum().backward()


def test_data_is_asked_for() -> None:
    smodel = SparseModel(Chain(), unstructured(), images())
    with pytest.raises(CalibrationError, match="no batch"):
        smodel.reconstruct([])


def test_norms_are_reestimated() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    batches = [torch.randn(64, 3, 4, 4) + 2 for _ in range(3)]
    reestimate_norms(model, batches)
    with torch.no_grad():
        outputs = model.eval()[0](torch.cat(batches))
    assert torch.allclose(model[1].running_mean, outputs.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(model[1].running_var, outputs.var((0, 2, 3)), rtol=0.05)
    with pytest.raises(CalibrationError, match="no batch norm"):
        reestimate_norms(nn.Linear(2, 2), [torch.randn(2, 2)])


@pytest.mark.parametrize("config", [structured(), unstructured(), unstructured(STRATEGY="sparsegpt")])
def test_a_very_wide_layer_is_fitted_in_parts(config: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Second moments of all its inputs would take gigabytes."""
    monkeypatch.setattr(layer_matrix, "_MOST_MOMENTS", 96**2)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 6))
    dense = dense.eval()
    batches, others = correlated(BATCHES), correlated(2)
    smodel = SparseModel(dense, config, images()).eval()
    smodel.calc_params(batches)
    before = error(smodel, dense, others)
    fits = smodel.reconstruct(batches)
    assert fits["3"].after < fits["3"].before
    assert error(smodel, dense, others) < before
