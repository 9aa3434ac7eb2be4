from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from sparsebit.errors import CalibrationError, CaptureError, ConfigError
from sparsebit.quantization import QuantModel, gptq, smooth
from sparsebit.quantization.algorithms.rescaling.channel_pairs_scaling import FloatRuns
from sparsebit.quantization.algorithms.rescaling.smoothing import _Samples
from tests.quantization.algorithms.rescaling.measures import error, float_difference

CONFIG = (
    "{BACKEND: virtual, DEVICE: cpu, W: {QSCHEME: per-channel-symmetric, QUANTIZER: {BIT: 8}}, "
    "A: {QSCHEME: per-tensor-affine, QUANTIZER: {BIT: 8}}}"
)
ORT = CONFIG.replace("virtual", "onnxruntime")


class Block(nn.Module):
    """A transformer block whose norm comes first, or last as in BERT."""

    def __init__(self, norm=nn.LayerNorm, is_first=True):
        super().__init__()
        self.is_first = is_first
        self.norm1, self.norm2 = norm(16), norm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def attention(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    def mlp(self, x):
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x):
        if self.is_first:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


def net(is_first=True, norm=nn.LayerNorm):
    torch.manual_seed(0)
    model = nn.Sequential(Block(norm, is_first), Block(norm, is_first)).eval()
    with torch.no_grad():
        for block in model:
            for part in (block.norm1, block.norm2):
                part.weight[::5] *= 30  # a few channels are large
            block.qkv.weight[:, ::5] /= 30
            block.fc1.weight[:, ::5] /= 30
    return model


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return list(torch.randn(3, 4, 6, 16))


@pytest.mark.sample(2)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm], ids=["layer", "rms"])
@pytest.mark.parametrize("alpha", [None, 0.5], ids=["searched", "fixed"])
def test_norms_take_the_scale_of_all_that_read_them(batches, norm, alpha):
    model = net(norm=norm)
    qmodel = sparsebit.quantize(model, batches, ORT)
    before = error(qmodel, model, batches)
    found = smooth(qmodel, batches, alpha=alpha)
    assert error(qmodel, model, batches) < 0.5 * before
    assert float_difference(qmodel, model, batches) < 1e-5
    assert found["0.norm1"].readers == ("0.qkv",) and found["0.norm1"].num_scaled == 16
    assert found["0.norm1"].after < 0.3 * found["0.norm1"].before
    assert found["0.qkv"].readers == ("0.proj",) and found["0.qkv"].num_scaled <= 16  # the values alone
    assert not any(result.is_inserted for result in found.values())


def test_what_cannot_be_folded_is_told_and_left(batches):
    model = net(is_first=False)
    qmodel = sparsebit.quantize(model, batches, ORT)
    found = smooth(qmodel, batches)
    assert found["0.norm1"].num_scaled == 0 and "residual" in found["0.norm1"].reason
    assert not any("smoothing" in name for name, _ in qmodel.model.named_modules())


@pytest.mark.slow
def test_what_cannot_be_folded_is_inserted_on_request(batches, tmp_path):
    model = net(is_first=False)
    qmodel = sparsebit.quantize(model, batches, ORT)
    again, before = copy.deepcopy(qmodel), error(qmodel, model, batches)
    found = smooth(qmodel, batches, insert=True)
    smooth(again, batches, insert=True)
    inserted = [result for result in found.values() if result.is_inserted]
    assert inserted and all(result.after < 0.9 * result.before for result in inserted)
    assert error(qmodel, model, batches) < 0.7 * before
    assert float_difference(qmodel, model, batches) < 1e-5
    loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), net(is_first=False))
    with torch.no_grad():
        expected = qmodel(batches[0])
        for other in (again, loaded, copy.deepcopy(qmodel), copy.deepcopy(loaded)):
            assert torch.equal(other(batches[0]), expected)


@pytest.fixture
def with_one_large_channel():
    """One channel of the MLP is far larger than all others, for few tokens; one weight that reads it is large too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        model[0].weight[5] = 0
        model[0].weight[5, 0] = 20
        model[2].weight[:, 5] *= 0.02
        model[2].weight[3, 5] = 30
    x = torch.randn(4, 64, 16)
    x[..., 0] = 0
    x[:, ::16, 0] = 1
    return model, list(x)


def test_one_channel_that_is_far_larger_than_all_others(with_one_large_channel):
    """One power for all channels cannot make it small: the large weight that reads it holds the power down."""
    model, data = with_one_large_channel
    qmodel = sparsebit.quantize(model, data, ORT)
    (found,) = smooth(qmodel, data, insert=True).values()
    assert found.cap < 1 and found.after < 0.3 * found.before
    assert float_difference(qmodel, model, data) < 1e-5


def test_a_fixed_alpha_has_no_cap(with_one_large_channel):
    model, data = with_one_large_channel
    found = smooth(sparsebit.quantize(model, data, ORT), data, insert=True, alpha=0.7)
    assert all(result.cap == 1 for result in found.values())


def test_a_second_smoothing_goes_on_from_the_first(batches):
    model = net(is_first=False)
    qmodel = sparsebit.quantize(model, batches, ORT)
    smooth(qmodel, batches, insert=True)
    first = error(qmodel, model, batches)
    names = [name for name, _ in qmodel.model.named_modules()]
    smooth(qmodel, batches, insert=True)
    assert [name for name, _ in qmodel.model.named_modules()] == names
    assert error(qmodel, model, batches) < 1.5 * first and float_difference(qmodel, model, batches) < 1e-5


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = net(is_first=False)[0]

    def forward(self, x):
        if x.dim() == 4:
            x = x.mean(1)
        return self.block(x)


def test_own_code_does_not_run_in_the_place_of_a_graph_with_insertions(batches):
    qmodel = sparsebit.quantize(Guarded().eval(), batches, ORT)
    smooth(qmodel, batches, insert=True)
    with pytest.raises(CaptureError, match="inserted by smoothing"):
        qmodel(batches[0][:, None])


def test_convolutions_are_smoothed_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        model[0].weight[0] *= 50
        model[2].weight[:, 0] /= 50
    batches = list(torch.randn(2, 4, 3, 8, 8))
    qmodel = sparsebit.quantize(model.eval(), batches, CONFIG)
    before = error(qmodel, model, batches)
    smooth(qmodel, batches)
    assert error(qmodel, model, batches) < before and float_difference(qmodel, model, batches) < 1e-5


def test_gptq_goes_on_from_it(batches):
    model = net()
    qmodel = sparsebit.quantize(model, batches, CONFIG.replace("BIT: 8}}, A", "BIT: 4}}, A"))
    smooth(qmodel, batches)
    before = error(qmodel, model, batches)
    gptq(qmodel, batches)
    assert error(qmodel, model, batches) < before


def test_options_and_data_are_checked(batches):
    qmodel = sparsebit.quantize(net(), batches, ORT)
    with pytest.raises(ConfigError, match=r"(?i)alpha=2"):
        smooth(qmodel, batches, alpha=2)
    with pytest.raises(CalibrationError, match="no batch"):
        smooth(qmodel, [])


@pytest.mark.slow
def test_the_file_agrees(batches, tmp_path):
    pytest.importorskip("onnxruntime")
    model = net(is_first=False)
    qmodel = sparsebit.quantize(model, batches, ORT)
    smooth(qmodel, batches, insert=True)
    assert qmodel.export_onnx(batches[0], tmp_path / "net.onnx", check=batches) is not None


def test_images_without_a_batch_axis():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight[3] *= 50
    images = list(torch.randn(12, 3, 8, 8))
    qmodel = sparsebit.quantize(model, images, CONFIG)
    assert smooth(qmodel, images, alpha=0.5)["0"].num_scaled == 12
    assert float_difference(qmodel, model, images) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inserted_factors_keep_half_precision(batches, dtype):
    model, data = net(is_first=False).to(dtype), [x.to(dtype) for x in batches]
    qmodel = sparsebit.quantize(model, data, CONFIG)
    found = smooth(qmodel, data, insert=True, alpha=0.5)
    assert any(result.is_inserted for result in found.values()) and qmodel(data[0]).dtype == dtype


def test_what_is_kept_does_not_grow_with_the_number_of_batches():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(64, 2))
    qmodel = sparsebit.quantize(layers.eval(), list(torch.randn(5, 2, 3, 8, 8)), CONFIG)
    kept = []
    for num_batches in (40, 160):
        data = list(torch.randn(num_batches, 2, 3, 8, 8))
        runs = FloatRuns(qmodel, data, verb="smooth", memory_budget=1 << 20)
        pairs = runs.pairs()
        samples = _Samples(pairs, len(runs.judge.pieces), 16, 1 << 20)
        runs.observe(samples)
        readers = [reader for pair in pairs for reader in pair.readers]
        kept.append([sum(len(part) for half in samples.of(reader) for part in half) for reader in readers])
        runs.close()
    assert kept == [[8, 16], [9, 17]]  # images of the convolution, rows of the linear layer
