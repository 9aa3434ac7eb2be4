from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization import QuantModel, equalize, gptq, smooth
from tests.parameters import first_fast
from tests.quantization.algorithms.rescaling.measures import error, float_difference

PER_TENSOR = (
    "{BACKEND: virtual, DEVICE: cpu, W: {QSCHEME: per-tensor-symmetric, QUANTIZER: {BIT: 8}}, "
    "A: {QSCHEME: per-tensor-affine, QUANTIZER: {BIT: 8}}}"
)
PER_CHANNEL = PER_TENSOR.replace("per-tensor-symmetric", "per-channel-symmetric")


def uneven(model, seed=0):
    """The same function with channels of very different sizes: what equalization is for."""
    generator = torch.Generator().manual_seed(seed)
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        for first, second in itertools.pairwise(layers):
            factor = torch.exp(2 * torch.randn(len(first.weight), generator=generator))
            first.weight.mul_(factor.reshape(-1, *([1] * (first.weight.ndim - 1))))
            first.bias.mul_(factor)
            if isinstance(second, nn.Conv2d) and second.groups > 1:
                second.weight.div_(factor.reshape(-1, 1, 1, 1))
            elif second.weight.shape[1] == len(factor):
                second.weight.div_(factor.reshape(1, -1, *([1] * (second.weight.ndim - 2))))
            else:  # behind a flatten
                second.weight.div_(factor.repeat_interleave(second.weight.shape[1] // len(factor)))
    return model


def depthwise_net(activation=nn.ReLU):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 1), activation(), nn.Conv2d(8, 8, 3, padding=1, groups=8), activation()),
        *(nn.Conv2d(8, 6, 1), activation(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5)),
    )
    return model.eval()


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return list(torch.randn(3, 8, 3, 8, 8))


def test_uneven_channels_are_made_even_and_the_float_model_stays(batches):
    model = uneven(depthwise_net())
    qmodel = sparsebit.quantize(model, batches, PER_TENSOR)
    before = error(qmodel, model, batches)
    found = equalize(qmodel, batches)
    assert error(qmodel, model, batches) < 0.05 * before
    assert float_difference(qmodel, model, batches) < 1e-5
    assert list(found) == ["0", "2", "4"] and found["2"].readers == ("4",)
    assert all(result.num_scaled == result.num_channels and not result.reason for result in found.values())
    assert all(result.after > result.before for result in found.values())
    assert qmodel.is_quantized("weight") and qmodel.is_quantized("activation")


def test_weights_per_channel_are_equalized_too(batches):
    model = uneven(depthwise_net())
    qmodel = sparsebit.quantize(model, batches, PER_CHANNEL)
    before = error(qmodel, model, batches)
    equalize(qmodel, batches)
    assert error(qmodel, model, batches) < before and float_difference(qmodel, model, batches) < 1e-5


def test_a_clip_keeps_what_it_clips(batches):
    model = depthwise_net(nn.ReLU6)
    with torch.no_grad():
        model[0].weight[0].mul_(30)  # this channel is clipped at 6
    qmodel = sparsebit.quantize(model, batches, PER_TENSOR)
    found = equalize(qmodel, batches)
    assert "clips" in found["0"].reason and 0 < found["0"].num_scaled < 8
    assert float_difference(qmodel, model, batches) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_fast(range(8), 3))
def test_random_nets_compute_the_same(seed):
    """Widths, groups, activations, pools and residuals in any order."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    torch.manual_seed(seed)
    layers, width = [], 4
    for _ in range(5):
        groups = pick(1, 1, 2, width)
        new = pick(4, 8) if groups <= 4 else width
        kind = pick(nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d)
        layers += [kind(width, new, 3, padding=1, groups=groups, bias=pick(True, False))]
        smooth = pick(nn.Identity(), nn.Sigmoid(), nn.Dropout())
        layers += [pick(nn.ReLU(), nn.LeakyReLU(), nn.PReLU(new), nn.ReLU6(), smooth)]
        layers += [pick(nn.Identity(), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(new))]
        width = new
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                factor = torch.exp(torch.randn(len(parameter), generator=generator))
                parameter.mul_(factor.reshape(-1, *[1] * (parameter.ndim - 1)))
    data = list(torch.randn(2, 4, 4, 6, 6, generator=generator))
    qmodel = sparsebit.quantize(model, data, PER_TENSOR)
    equalize(qmodel, data)
    assert float_difference(qmodel, model, data) < 1e-4


def test_biases_are_absorbed_where_a_constant_stays_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        model[0].bias.add_(20)
    data = [torch.randn(64, 4)]
    qmodel = sparsebit.quantize(model, data, PER_TENSOR)
    kept = copy.deepcopy(qmodel)
    found = equalize(qmodel, data)
    equalize(kept, data, absorb_bias=False)
    assert found["0"].absorbed > 1 and float_difference(qmodel, model, data) < 1e-5
    assert error(qmodel, model, data) < error(kept, model, data)


def test_it_survives_saving_and_copies_and_repeats(batches, tmp_path):
    model = uneven(depthwise_net())
    qmodel = sparsebit.quantize(model, batches, PER_TENSOR)
    again = copy.deepcopy(qmodel)
    equalize(qmodel, batches)
    equalize(again, batches)
    loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), depthwise_net())
    with torch.no_grad():
        expected = qmodel(batches[0])
        for other in (again, loaded, copy.deepcopy(qmodel)):
            assert torch.equal(other(batches[0]), expected)


def test_gptq_goes_on_from_it(batches):
    model = uneven(depthwise_net())
    config = PER_TENSOR.replace("BIT: 8}}, A", "BIT: 4}}, A")
    plain, qmodel = (sparsebit.quantize(model, batches, config) for _ in range(2))
    gptq(plain, batches)
    equalize(qmodel, batches)
    gptq(qmodel, batches)
    assert error(qmodel, model, batches) < error(plain, model, batches)


def test_weights_alone_need_no_data():
    model = uneven(depthwise_net())
    x = torch.randn(2, 3, 8, 8)
    config = PER_TENSOR.replace(
        "per-tensor-affine, QUANTIZER: {BIT: 8}", "per-tensor-affine, QUANTIZER: {DISABLE: true}"
    )
    qmodel = QuantModel(model, config, example_inputs=x)
    qmodel.prepare_calibration()
    qmodel.calc_qparams()
    qmodel.set_quant(True, True)
    before = error(qmodel, model, [x])
    equalize(qmodel)
    assert error(qmodel, model, [x]) < 0.05 * before


def test_activations_need_data(batches):
    qmodel = sparsebit.quantize(depthwise_net(), batches, PER_TENSOR)
    with pytest.raises(CalibrationError, match="give the calibration data"):
        equalize(qmodel)
    for nothing in ([], [batches[0][:0]]):
        with pytest.raises(CalibrationError, match="no batch with samples"):
            equalize(qmodel, nothing)


@pytest.mark.parametrize("algorithm", [equalize, smooth])
def test_an_empty_batch_changes_nothing(algorithm, batches):
    one, other = (sparsebit.quantize(uneven(depthwise_net()), batches, PER_TENSOR) for _ in range(2))
    algorithm(one, batches)
    algorithm(other, [batches[0][:0], *batches])
    with torch.no_grad():
        assert torch.equal(one(batches[0]), other(batches[0]))


def test_a_model_that_is_not_calibrated_is_refused(batches):
    qmodel = QuantModel(depthwise_net(), PER_TENSOR, example_inputs=batches[0])
    with pytest.raises(CalibrationError, match=r"equalize\(\) needs a calibrated model"):
        equalize(qmodel, batches)


def test_options_are_checked(batches):
    qmodel = sparsebit.quantize(depthwise_net(), batches, PER_TENSOR)
    with pytest.raises(ConfigError, match=r"(?i)iterations=0"):
        equalize(qmodel, batches, iterations=0)


class Secret(nn.Module):
    """Not homogeneous, and it says that it is a dropout."""

    def forward(self, x):
        return x + 0.1


def test_a_pair_that_changes_the_float_output_is_undone(batches):
    model = uneven(depthwise_net())
    model[1] = nn.Sequential(nn.ReLU(), type("DropPath", (Secret,), {})())
    qmodel = sparsebit.quantize(model, batches, PER_TENSOR)
    found = equalize(qmodel, batches)
    assert float_difference(qmodel, model, batches) < 1e-5
    assert found["2"].num_scaled == 8  # the others are equalized all the same


@pytest.mark.slow
def test_the_file_agrees(batches, tmp_path):
    pytest.importorskip("onnxruntime")
    model = uneven(depthwise_net())
    qmodel = sparsebit.quantize(model, batches, "onnxruntime")
    equalize(qmodel, batches)
    parity = qmodel.export_onnx(batches[0], tmp_path / "net.onnx", check=batches)
    assert parity is not None


def test_the_config_asks_for_it(batches):
    model = uneven(depthwise_net())
    qmodel = sparsebit.quantize(model, batches, PER_TENSOR[:-1] + ", ALGORITHMS: [{equalize: {ITERATIONS: 30}}]}")
    plain = sparsebit.quantize(model, batches, PER_TENSOR)
    assert error(qmodel, model, batches) < 0.05 * error(plain, model, batches)
