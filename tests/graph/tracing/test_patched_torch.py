from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.tracing.patched_torch import traced_factories, unfused_attention
from sparsebit.graph.tracing.tracer import LeafTracer


def look_around_and_fail() -> None:
    assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.arange(3).tolist() == [0, 1, 2] and torch.finfo(torch.float32).bits == 32
    raise KeyError


def test_torch_is_as_before_also_after_an_error() -> None:
    saved, enabled = (torch.arange, torch.rand, torch.finfo), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), traced_factories(LeafTracer(LeafPolicy())), unfused_attention():
        look_around_and_fail()
    assert (torch.arange, torch.rand, torch.finfo) == saved and torch.backends.mha.get_fastpath_enabled() is enabled


def test_torch_remembers_no_patched_function(project_root: Path) -> None:
    """In a fresh process: torch fills its lists of functions at their first use, which may be in a trace."""
    code = (
        "import torch; from torch import nn\n"
        "from sparsebit.graph.tracing.leaf_policy import LeafPolicy\n"
        "from sparsebit.graph.tracing.tracer import LeafTracer\n"
        "LeafTracer(LeafPolicy()).trace(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))\n"
        "listed = torch.overrides.get_ignored_functions()\n"
        "assert torch.arange in listed\n"
        "assert not [f for f in listed if 'traced_factories' in getattr(f, '__qualname__', '')]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plain_calls_are_not_recorded_but_random_ones_are() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(3) + torch.rand(3)

    targets = [node.target for node in LeafTracer(LeafPolicy()).trace(Model()).nodes]
    assert torch.rand in targets and torch.ones not in targets
