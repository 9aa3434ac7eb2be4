from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sparsebit.quantization.speed.compiler.inductor_options import compiler_options
from tests.quantization.tiny_training import data, ready


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_compiled_in_place(mode: str | None) -> None:
    from torch._inductor import config

    qmodel = ready("lsq")
    plain = copy.deepcopy(qmodel)
    seen = []

    def watch(graph: torch.fx.Graph) -> None:
        seen.append((config.max_autotune, type(config.pre_grad_custom_pass)))

    qmodel.compile(fullgraph=True, mode=mode, options={"joint_custom_pre_pass": watch})
    x, labels = data()
    losses = [F.cross_entropy(model(x), labels) for model in (qmodel, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for (name, one), two in zip(qmodel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert seen == [(mode is not None, type(compiler_options("cpu")["pre_grad_custom_pass"]))]


def test_options_are_inductors() -> None:
    from torch._inductor import config

    assert all(hasattr(config, name) for name in compiler_options("cuda"))
