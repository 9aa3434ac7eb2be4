"""In-place writes: every reader sees what eager PyTorch shows it, then quantized; and so does the caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from tests.quantization.tiny import calibrated, qconfig

Code = Callable[["Program", Tensor], Tensor]


class Program(nn.Module):
    """Layers for the programs below, which differ in their forward alone."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.small, self.conv = nn.Linear(4, 4), nn.Conv1d(2, 2, 3, padding=1)
        self.relu, self.hardtanh = nn.ReLU(inplace=True), nn.Hardtanh(-0.5, 0.5, inplace=True)
        self.scale = Scale()
        self.register_buffer("memory", torch.zeros(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Scale(nn.Module):
    """Writes, in code that cannot be traced."""

    def forward(self, x: Tensor) -> None:
        if float(x.detach().abs().max()) < 1e9:
            x *= 2


class Branching(Program):
    """The same as code that cannot be traced: its layers stand alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x) if float(x.detach().abs().max()) < 1e9 else x


def _mul(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :4].mul_(2)
    return y


def _relu(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :4].relu_()
    return m.b(y)


def _torch_relu(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    torch.relu_(y[:, :4])
    return m.b(y) + y


def _sigmoid(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 2:6].sigmoid_()
    return y


def _divide(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :4].div_(y[:, 4:].abs() + 1)
    return m.b(y)


def _tanh_of_a_chunk(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    left, _ = y.chunk(2, 1)
    left.tanh_()
    return m.b(y)


def _add_to_a_part(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    for part in y.unbind(0)[:2]:
        part += 1
    return m.b(y)


def _zero_behind_readers(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y[:, :4]
    v.zero_()
    return m.b(y) + m.c(y)


def _between_readers(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y[:, :4]
    before = m.b(y)
    v.mul_(-3)
    return before + m.c(y) + m.b(y)


def _in_a_loop(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    for index in range(1, 4):
        y[:, index] += y[:, index - 1] * 0.5
    return m.b(y)


def _by_two_views(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    left, middle = y[:, :4], y[:, 2:6]
    left.mul_(2)
    middle.add_(1.5)
    return m.b(y) + m.c(middle.repeat(1, 2))


def _sum_into(m: Program, x: Tensor) -> Tensor:
    y, z = m.a(x), m.b(x)
    v = y.view(-1)
    torch.add(y, z, out=z)
    v.mul_(2)
    return m.c(y) + z


def _out_of_a_view(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    torch.mul(y[:, :4], y[:, 4:], out=y[:, 4:])
    return m.b(y) + m.c(y)


def _item(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y.t()
    y[:, :4] = y[:, 4:] * 2
    return m.b(y) + m.c(v.t())


def _aug_assign(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y[:, 4:]
    v *= 3
    v -= 1
    return m.b(y) + y


def _clamp(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :4].clamp_(-0.1, 0.1)
    return m.b(y)


def _masked_fill(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y[:, :4]
    v.masked_fill_(v > 0, 0.5)
    return m.b(y)


def _copy(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :4].copy_(m.small(y[:, 4:]))
    return m.b(y)


def _module(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    m.relu(y[:, :4])
    return m.b(y)


def _module_result(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    z = m.hardtanh(y[:, :4])
    return m.b(y) + F.pad(m.small(z), (0, 4))


def _functional(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    F.elu(y[:, :4], inplace=True)
    F.leaky_relu_(y[:, 4:])
    return m.b(y) * y


def _residual(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    z = m.relu(y)
    return m.b(z) + y


def _added(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y[:2]
    y += m.b(y)
    return m.c(y).clone().index_copy(0, torch.arange(2), v)


def _convolution(m: Program, x: Tensor) -> Tensor:
    y = m.conv(x.view(3, 2, 8))
    y[:, 0].relu_()
    y[:, 1] = y[:, 0] - y[:, 1]
    return m.conv(y).flatten(0, 1)


def _buffer(m: Program, x: Tensor) -> Tensor:
    old = m.b(m.memory)
    m.memory.copy_(m.a(x))
    return old + m.c(m.memory)


def _buffer_part(m: Program, x: Tensor) -> Tensor:
    m.memory[:, :4] = m.a(x)[:, :4]
    m.memory[:, 4:].add_(1)
    return m.b(m.memory) + m.memory


def _input(m: Program, x: Tensor) -> Tensor:
    x.mul_(2)
    return m.a(x)


def _input_part(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    x[:, :4] = y[:, :4]
    return m.b(x) + y


def _input_module(m: Program, x: Tensor) -> Tensor:
    return m.a(m.relu(x)) + x


def _reshaped(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y.reshape(3, 2, 8).transpose(1, 2)
    z[:, :3].mul_(0.5)
    y.view(-1, 4)[::2].neg_()
    return m.b(y) + m.c(z.transpose(1, 2).flatten(0, 1))


def _hidden(m: Program, x: Tensor) -> Tensor:
    """A module of the user's own that cannot be traced writes into what it is given, and its result is not read."""
    y = m.a(x)
    before = m.b(y)
    m.scale(y[:, :4])
    return before + m.b(y) + m.c(y)


PROGRAMS = [
    _hidden,
    *(_mul, _relu, _torch_relu, _sigmoid, _divide, _tanh_of_a_chunk, _add_to_a_part, _zero_behind_readers),
    *(_between_readers, _in_a_loop, _by_two_views, _sum_into, _out_of_a_view, _item, _aug_assign, _clamp),
    *(_masked_fill, _copy, _module, _module_result, _functional, _residual, _added, _convolution, _buffer),
    *(_buffer_part, _input, _input_part, _input_module, _reshaped),
]


def forget(model: nn.Module, qmodel: QuantModel) -> None:
    """Both begin with an empty memory."""
    for buffer in (*model.buffers(), *(b for name, b in qmodel.named_buffers() if name.endswith("memory"))):
        buffer.zero_()


ADDS = {"A.QADD.ENABLE_QUANT": True}


@pytest.mark.sample(13)
@pytest.mark.parametrize("kind", [Program, Branching])
@pytest.mark.parametrize("code", PROGRAMS, ids=lambda code: code.__name__)
def test_readers_see_what_they_see_in_eager_mode(code: Code, kind: type[Program]) -> None:
    torch.manual_seed(0)
    model = kind(code).eval()
    batches = [torch.randn(6, 8) for _ in range(4)]
    with torch.no_grad():
        qmodel = calibrated(model, [batch.clone() for batch in batches], qconfig(ADDS, bits=16))
        for batch in batches:
            forget(model, qmodel)
            given, expected_input = batch.clone(), batch.clone()
            expected = model(expected_input)
            torch.testing.assert_close(qmodel(given), expected, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(given, expected_input, atol=2e-3, rtol=2e-3)


@pytest.mark.sample(19)
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
@pytest.mark.parametrize("code", PROGRAMS, ids=lambda code: code.__name__)
def test_readers_see_the_same_on_a_runtime(code: Code, backend: str) -> None:
    torch.manual_seed(0)
    model, batch = Program(code).eval(), torch.randn(6, 8)
    with torch.no_grad():
        qmodel = calibrated(model, [batch.clone()], qconfig(backend=backend))
        forget(model, qmodel)
        expected = model(batch.clone())
        error = (qmodel(batch.clone()) - expected).norm() / expected.norm()
    assert error < 0.06


@pytest.mark.sample(14)
@pytest.mark.parametrize("code", PROGRAMS, ids=lambda code: code.__name__)
def test_layer_by_layer_calibration_sees_the_same(code: Code) -> None:
    torch.manual_seed(0)
    model, batch = Program(code).eval(), torch.randn(6, 8)
    with torch.no_grad():
        qmodel = calibrated(model, [batch.clone()], qconfig(ADDS, bits=16), asym=True)
        forget(model, qmodel)
        torch.testing.assert_close(qmodel(batch.clone()), model(batch.clone()), atol=2e-3, rtol=2e-3)


def _after_a_sum(m: Program, x: Tensor) -> Tensor:
    y = x + x
    torch.sigmoid_(x)
    return m.a(y)


def _of_itself(m: Program, x: Tensor) -> Tensor:
    x[...] = x + 1
    return x * 2


def _through_a_view(m: Program, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y + x
    y.detach().unsqueeze(0).neg_()
    return m.b(z)


def _inside_a_layer(m: Program, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    x.zero_()
    return y


def _into_itself(m: Program, x: Tensor) -> Tensor:
    y = F.hardtanh(x, inplace=True)
    y += x
    return y


def _into_a_view_of_itself(m: Program, x: Tensor) -> Tensor:
    y = F.dropout(x, 0.0, training=True, inplace=True)
    y[:, :4] -= x[:, 4:]
    return y * 2


@pytest.mark.parametrize(
    "code", [_after_a_sum, _of_itself, _through_a_view, _inside_a_layer, _into_itself, _into_a_view_of_itself]
)
def test_what_a_quantizer_has_read_is_kept_for_the_backward(code: Code) -> None:
    model, x = Program(code), torch.randn(6, 8)
    qmodel = calibrated(model, [x.clone()], qconfig({"A.QADD.ENABLE_QUANT": True}, bits=16)).train()
    gradients = []
    for one in (model, qmodel):
        leaf = x.clone().requires_grad_()
        one(leaf * 0.9).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients, rtol=1e-2, atol=1e-2)
