"""What must not be rounded to zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.quantization.tiny import calibrated, qconfig, sites

Code = Callable[[Tensor], Tensor]


class Divided(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.last = code, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(x))


CODES: dict[str, Code] = {
    "largest": lambda x: x / x.abs().amax(-1, keepdim=True),
    "mean": lambda x: x / x.abs().mean(-1, keepdim=True),
    "square": lambda x: x / (x * x).sum(-1, keepdim=True).sqrt(),
    "div": lambda x: torch.div(x, x.norm(dim=-1, keepdim=True)),
    "method": lambda x: x.div(other=x.abs().sum(-1, keepdim=True)),
    "in_place": lambda x: x.clone().div_(x.abs().sum(-1, keepdim=True)),
    "true_divide": lambda x: torch.true_divide(x, x.abs().mean(-1, keepdim=True)),
    "floor_divide": lambda x: torch.floor_divide(x, x.abs().mean(-1, keepdim=True)),
    "number": lambda x: 1e-3 / x.abs().mean(-1, keepdim=True) * x,
    "reciprocal": lambda x: x.abs().mean(-1, keepdim=True).reciprocal() * x,
    "rsqrt": lambda x: x * (x * x).mean(-1, keepdim=True).rsqrt(),
    "power": lambda x: x * (x * x).mean(-1, keepdim=True).pow(-0.5),
    "operator": lambda x: x * (x * x).mean(-1, keepdim=True) ** -0.5,
    "log": lambda x: (x * x).mean(-1, keepdim=True).log() + x,
    "epsilon": lambda x: x / (x.abs().mean(-1, keepdim=True) + 1e-12),
}


@pytest.mark.sample(14)
@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
@pytest.mark.parametrize("name", CODES)
def test_quiet_rows_stay_finite(name: str, backend: str) -> None:
    """Rows that are a thousand times smaller than others, at 8 bits."""
    torch.manual_seed(0)
    model = Divided(CODES[name]).eval()
    x = torch.randn(32, 8)
    x[::2] *= 1e-5
    changes = {"A.QADD.ENABLE_QUANT": True} if backend == "virtual" else {}
    qmodel = calibrated(model, [x], qconfig(changes, backend=backend))
    with torch.no_grad():
        assert bool(torch.isfinite(qmodel(x)).all())
        assert bool(torch.isfinite(qmodel(x * 1e-3)).all())


def test_a_quantized_output_is_divided_by_in_float() -> None:
    class Ratio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.last(y) / y

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    x[0] *= 1e-4
    qmodel = calibrated(Ratio().eval(), [x], qconfig(backend="onnxruntime"))
    with torch.no_grad():
        assert bool(torch.isfinite(qmodel(x)).all())


def test_coverage_says_why_the_divisor_is_float() -> None:
    qmodel = calibrated(Divided(CODES["mean"]).eval(), [torch.randn(4, 8)])
    assert "truediv.input.0" in sites(qmodel) and not any("mean" in site for site in sites(qmodel))
    reasons = {layer.name: layer.reason for layer in qmodel.coverage.float_layers}
    assert "infinity" in reasons["mean"] and any("divisor" in name for name in reasons)
