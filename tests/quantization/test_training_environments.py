"""Training inside of what people train with: autocast, torch.compile, checkpointing; and torch.export at the end."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsebit.quantization import DistillationLoss, QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization.tiny import prepared, qconfig
from tests.quantization.tiny_training import SOME_WAYS, WAYS, Net, data, numbers, ready, train


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).float(), labels)
    loss.backward()
    return loss.detach()


def gradients(qmodel: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in qmodel.named_parameters() if p.grad is not None}


def assert_alike(one: QuantModel, other: QuantModel, tolerance: float = 1e-5) -> None:
    """Gradients and, where training moves them, buffers."""
    left, right = gradients(one), gradients(other)
    assert left.keys() == right.keys() and left
    for name, grad in left.items():
        torch.testing.assert_close(grad, right[name], rtol=tolerance, atol=tolerance, msg=name)
    for name, value in one.named_buffers():
        torch.testing.assert_close(value, other.get_buffer(name), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_autocast(way: str) -> None:
    qmodel, (x, labels) = ready(way), data(6)
    before = numbers(qmodel)
    loss_fn = DistillationLoss(Net())
    optimizer = torch.optim.SGD(qmodel.parameter_groups(0.05))
    with torch.autocast("cpu", torch.bfloat16):
        output = qmodel(x)
        loss = loss_fn(output, x, labels)
    assert output.dtype == torch.bfloat16
    loss.backward()
    trainable = [p for p in qmodel.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trainable)
    optimizer.step()
    after = numbers(qmodel)
    assert all(after[name].dtype == before[name].dtype and after[name].isfinite().all() for name in after)
    assert not torch.equal(after["model.conv1.op.weight"], before["model.conv1.op.weight"])


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("way", SOME_WAYS)
def test_compile_sees_one_graph(way: str) -> None:
    """The whole model, training included, without a break; two steps, so that what the first moved counts."""
    qmodel = ready(way)
    plain = copy.deepcopy(qmodel)
    compiled = torch.compile(qmodel, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x, labels = data()
        torch.testing.assert_close(step(compiled, x, labels), step(plain, x, labels))
    assert_alike(qmodel, plain)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_notices_freezing() -> None:
    qmodel = ready("following")
    compiled = torch.compile(qmodel, backend="aot_eager", fullgraph=True)
    step(compiled, *data())
    qmodel.freeze("observers", "batchnorm")
    before = dict(numbers(qmodel))
    step(compiled, *data())
    assert all(torch.equal(value, before[name]) for name, value in numbers(qmodel).items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor() -> None:
    qmodel = ready("lsq")
    plain = copy.deepcopy(qmodel)
    compiled = torch.compile(qmodel, fullgraph=True)
    x, labels = data()
    torch.testing.assert_close(step(compiled, x, labels), step(plain, x, labels))
    assert_alike(qmodel, plain, 1e-4)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_in_place_by_another_compiler() -> None:
    qmodel = ready("lsq")
    plain, (x, labels) = copy.deepcopy(qmodel), data()
    qmodel.compile(backend="aot_eager")
    torch.testing.assert_close(step(qmodel, x, labels), step(plain, x, labels))
    assert_alike(qmodel, plain)


@pytest.mark.parametrize("way", WAYS)
def test_export_of_the_trained_model(way: str) -> None:
    qmodel, (x, _) = train(ready(way)).eval(), data()
    with torch.no_grad():
        program = torch.export.export(qmodel, (x,))
        torch.testing.assert_close(program.module()(x), qmodel(x))
    sites = [n for n in program.graph.nodes if n.target is torch.ops.sparsebit.fake_quantize.default]
    assert len(sites) == sum(quantizer.is_enable for quantizer in qmodel.quantizers())


@pytest.mark.parametrize("way", WAYS)
def test_checkpoint_around_the_model(way: str) -> None:
    """What is computed again in the backward moves no range; only batch norms take their statistics twice, as ever."""
    qmodel = ready(way, {"SCHEDULE.FUSE_BN": True})
    plain, (x, labels) = copy.deepcopy(qmodel), data()
    step(plain, x, labels)
    F.cross_entropy(checkpoint(qmodel, x, use_reentrant=False), labels).backward()
    assert_alike(qmodel, plain, 0.0)


class Staged(nn.Module):
    """Checkpoints its own stages, in code that cannot be traced."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        stages = [nn.Sequential(nn.Conv2d(c, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()) for c in (1, 4)]
        self.stages, self.fc = nn.ModuleList(stages), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 1e6:
            return x
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False) if self.checkpoints else stage(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_checkpoints_its_stages(way: str) -> None:
    config, follow = WAYS[way]
    (x, labels), made, num_calls = data(), [], []
    for checkpoints in (True, False):
        torch.manual_seed(0)
        qmodel = prepared(Staged(checkpoints), [x], qconfig(config, bits=4))
        qmodel.init_QAT(follow_ranges=follow)
        calls: list[str] = []
        conv = next(module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
        conv.register_forward_hook(lambda *_, calls=calls: calls.append("conv"))
        step(qmodel.train(), x, labels)
        made.append(qmodel)
        num_calls.append(len(calls))
    assert num_calls == [2, 1]
    assert_alike(*made, 0.0)


def test_checkpoint_around_modules_of_the_graph() -> None:
    parts = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    qmodel = prepared(parts, [x], qconfig({"W.QUANTIZER.TYPE": "lsq", "A.QUANTIZER.TYPE": "lsq"}, bits=4))
    qmodel.init_QAT()
    plain = copy.deepcopy(qmodel.train())
    plain(x).sum().backward()
    for name in ("0", "2", "4"):
        module = qmodel.model.get_submodule(name)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    qmodel(x).sum().backward()
    assert_alike(qmodel, plain, 0.0)
