"""One test per fault of the first Sparsebit that touches quantization, named after it; each would have failed there."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.config.section import Section
from sparsebit.errors import ConfigError
from sparsebit.numerics import reference
from sparsebit.numerics.spec import PerChannel, PerTensor, TensorSpec
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.observers.aciq import AciqOptions
from tests.quantization.tiny import Residual, TwoLayers, calibrated, qconfig, run, site, sites

IMAGES = (2, 3, 8, 8)
INT8, UINT8 = TensorSpec(8, True, PerTensor()), TensorSpec(8, False, PerTensor())


def observed(name: str, x: Tensor, spec: TensorSpec = INT8, options: Section | None = None) -> tuple[Tensor, Tensor]:
    observer = build_observer(name, spec, options, "activation")
    for batch in x if isinstance(x, list) else [x]:
        observer.update(batch)
    return observer.calc_range()


class TestNumbers:
    def test_kl_threshold_was_a_constant_fraction_of_the_maximum(self) -> None:
        """It reacts to the distribution: even data keeps its maximum, a far outlier is cut."""
        even = torch.linspace(-1, 1, 100_001)
        outlier = torch.cat([torch.randn(100_000), torch.tensor([60.0])])
        fraction = [float(observed("kl_histogram", x)[1] / x.max()) for x in (even, outlier)]
        assert fraction[0] > 0.95 and fraction[1] < 0.5

    def test_kl_never_loses_to_minmax_by_margins(self) -> None:
        for x in (torch.randn(50_000), torch.rand(50_000), torch.randn(50_000).relu(), torch.randn(50_000) ** 3):
            errors = []
            for name in ("kl_histogram", "minmax"):
                spec = TensorSpec(8, bool((x < 0).any()), PerTensor())
                quantizer = calibrated(
                    nn.Sequential(nn.Sigmoid()),
                    [x],
                    qconfig(
                        {
                            "A.OBSERVER.TYPE": name,
                            "A.QSCHEME": f"per-tensor-{'symmetric' if spec.symmetric else 'affine'}",
                        }
                    ),
                )
                errors.append(F.mse_loss(site(quantizer, "0.input")(x), x))
            assert errors[0] <= 1.05 * errors[1]

    def test_no_backward_on_cpu(self) -> None:
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)])
        qmodel(torch.randn(4, 6)).sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in qmodel.parameters())

    @pytest.mark.slow
    def test_kernels_compiled_at_import(self) -> None:
        """Importing compiles nothing, starts no process and touches no GPU."""
        code = (
            "import subprocess, torch\n"
            "def refuse(*a, **k): raise SystemExit('a process was started at import')\n"
            "subprocess.Popen.__init__ = refuse\n"
            "import sparsebit.quantization\n"
            "assert not torch.cuda.is_initialized()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("channels", [1, 3])
    def test_gradient_lost_past_a_grid_cap(self, channels: int) -> None:
        """1.4 M elements per channel: the last one has its gradient too, and all count in the scale's."""
        spec = TensorSpec(8, True, PerTensor() if channels == 1 else PerChannel(0))
        qmodel = calibrated(
            nn.Sequential(nn.Sigmoid()), [torch.randn(channels, 4)], qconfig({"A.QUANTIZER.TYPE": "lsq"})
        )
        quantizer = site(qmodel, "0.input")
        quantizer.spec = spec
        high = torch.full((channels,) if channels > 1 else (), 127.0)
        quantizer.calc_qparams_with_minmax(-high, high)  # scale 1
        x = torch.full((channels, 1_400_000), 0.25, requires_grad=True)
        quantizer(x).sum().backward()
        assert x.grad is not None and bool((x.grad == 1).all())
        expected = -0.25 * 1_400_000 / (1_400_000 * 127) ** 0.5
        torch.testing.assert_close(quantizer.scale.grad, torch.full_like(quantizer.scale, expected))

    @pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
    @pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
    def test_every_bit_width_was_clipped_with_the_8_bit_range(self, bits: int, symmetric: bool) -> None:
        """What leaves by torch.export clips as the simulation does."""
        scheme = "symmetric" if symmetric else "affine"
        config = qconfig({"A.QSCHEME": f"per-tensor-{scheme}", "W.QSCHEME": f"per-channel-{scheme}"}, bits=bits)
        qmodel, x = calibrated(TwoLayers(), [torch.randn(8, 6)], config), 3 * torch.randn(8, 6)
        program = torch.export.export(qmodel.model, (x,))
        nodes = [n for n in program.graph.nodes if n.target is torch.ops.sparsebit.fake_quantize.default]
        spec = TensorSpec(bits, symmetric, PerTensor())
        assert {tuple(node.args[5:7]) for node in nodes} == {(spec.qmin, spec.qmax)}
        assert torch.equal(program.module()(x), qmodel(x))
        assert site(qmodel, "first.input")(x).unique().numel() <= 2**bits

    def test_dorefas_export_skipped_tanh(self) -> None:
        qmodel, x = (
            calibrated(TwoLayers(), [torch.randn(8, 6)], qconfig({"W.QUANTIZER.TYPE": "dorefa"})),
            torch.randn(8, 6),
        )
        program = torch.export.export(qmodel.model, (x,))
        weights = {node.args[0].target for node in program.graph.nodes if str(node.args[-1:]).endswith(".weight',)")}
        assert weights == {torch.ops.aten.tanh.default}
        assert torch.equal(program.module()(x), qmodel(x))

    def test_aciq_per_channel_used_the_whole_tensors_count(self) -> None:
        """A channel's range does not depend on how many other channels there are."""
        x = torch.randn(64, 1, 50)
        spec = TensorSpec(4, True, PerChannel(1))
        one, many = observed("aciq", x, spec), observed("aciq", x.expand(64, 32, 50), spec)
        torch.testing.assert_close(many[1], one[1].expand(32), rtol=1e-3, atol=0)

    @pytest.mark.parametrize("bits", [1, 9, 12, 16])
    @pytest.mark.parametrize("distribution", ["GAUS", "LAPLACE"])
    def test_aciq_had_no_table_beyond_8_bits(self, bits: int, distribution: str) -> None:
        spec, options = TensorSpec(bits, True, PerTensor()), AciqOptions(DISTRIBUTION=distribution)
        _, high = observed("aciq", torch.randn(5000), spec, options)
        assert 0 <= high < 100 and bool(high.isfinite())

    def test_moving_average_ignored_per_channel(self) -> None:
        config = qconfig({"A.OBSERVER.TYPE": "moving_average", "A.QSCHEME": "per-channel-symmetric"})
        x = torch.randn(2, 3, 8, 8) * torch.tensor([1.0, 10.0, 100.0]).reshape(1, 3, 1, 1)
        scale = site(calibrated(Residual().eval(), [x, x[:1]], config), "stem.conv.input").scale
        assert scale.shape == (3,) and scale[2] > 5 * scale[1] > 25 * scale[0]

    @pytest.mark.parametrize("side", ["W", "A"])
    @pytest.mark.parametrize("bits", [0, None], ids=["zero", "missing"])
    def test_bit_0_only_warned(self, side: str, bits: int | None) -> None:
        values: dict[str, Any] = {"W": {"QUANTIZER": {"BIT": 8}}, "A": {"QUANTIZER": {"BIT": 8}}}
        values[side]["QUANTIZER"] = {} if bits is None else {"BIT": bits}
        with pytest.raises(ConfigError, match=rf"{side}.QUANTIZER.BIT"):
            parse_qconfig(values)


class TestCalibration:
    @pytest.mark.parametrize("asym", [False, True], ids=["plain", "asym"])
    def test_batches_were_concatenated_on_the_channel_axis(self, asym: bool) -> None:
        config = qconfig({"A.QSCHEME": "per-channel-affine"})
        batches = [torch.randn(4, 3, 8, 8), torch.randn(1, 3, 8, 8)]
        qmodel = calibrated(Residual().eval(), batches, config, asym=asym)
        quantizer = site(qmodel, "stem.conv.input")
        values = torch.cat(batches).transpose(0, 1).flatten(1)
        torch.testing.assert_close(quantizer.scale, (values.amax(1) - values.amin(1)) / 255)

    def test_all_batches_of_all_activations_stayed_in_ram(self) -> None:
        qmodel = QuantModel(Residual().eval(), qconfig())
        qmodel.prepare_calibration(keep_inputs=False)
        kept: list[Any] = []
        qmodel.model.conv.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
        run(qmodel, torch.randn(3, *IMAGES))
        assert len(kept) == 3 and all(reference() is None for reference in kept)

    @pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-channel-affine"])
    def test_a_calibrated_state_dict_did_not_load_into_a_fresh_model(self, scheme: str) -> None:
        config = qconfig({"A.QSCHEME": scheme})
        qmodel, x = calibrated(Residual().eval(), [torch.randn(IMAGES)], config), torch.randn(IMAGES)
        fresh = QuantModel(Residual(), config)
        assert str(fresh.load_state_dict(qmodel.state_dict())) == "<All keys matched successfully>"
        fresh.set_quant(w_quant=True, a_quant=True)
        assert torch.equal(fresh.eval()(x), qmodel(x))

    def test_device_was_ignored_by_quantizers_and_observers(self) -> None:
        """On a second device: everything of the quantized model is there. (A CPU-only box has but the meta device.)"""
        qmodel = calibrated(TwoLayers(), [torch.randn(4, 6)], qconfig({"A.QSCHEME": "per-channel-symmetric"})).to(
            "meta"
        )
        assert {t.device.type for t in [*qmodel.parameters(), *qmodel.buffers()]} == {"meta"}
        assert qmodel(torch.empty(4, 6, device="meta")).device.type == "meta"


class TestGraphAndOps:
    # More of them, such as ops that nobody registered: test_ops_matrix.py.
    @pytest.mark.parametrize(
        "op",
        [lambda x: torch.cat([x, x]), lambda x: torch.ones(6, device=x.device) * x, lambda x: torch.bmm(x, x.mT)],
        ids=["cat", "device", "bmm"],
    )
    def test_ops_that_crashed(self, op: Any) -> None:
        model, x = Holder(op), torch.randn(2, 4, 6)
        assert torch.equal(QuantModel(model, qconfig())(x), model(x))
        calibrated(model, [x])(x)

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize(
        ("layer", "norm", "shape"),
        [
            (nn.Conv1d, nn.BatchNorm1d, (4, 3, 8)),
            (nn.Conv2d, nn.BatchNorm2d, (4, 3, 8, 8)),
            (nn.Conv3d, nn.BatchNorm3d, (4, 3, 4, 4, 4)),
            (nn.ConvTranspose1d, nn.BatchNorm1d, (4, 3, 8)),
            (nn.ConvTranspose2d, nn.BatchNorm2d, (4, 3, 8, 8)),
            (nn.ConvTranspose3d, nn.BatchNorm3d, (4, 3, 4, 4, 4)),
            (nn.Linear, nn.BatchNorm1d, (8, 3)),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_bn_folding_with_bias_linear_and_transposed(self, layer: Any, norm: Any, shape: Any, bias: bool) -> None:
        front = layer(3, 6, bias=bias) if layer is nn.Linear else layer(3, 6, 3, bias=bias)
        model, x = nn.Sequential(front, norm(6)), torch.randn(shape)
        with torch.no_grad():
            for _ in range(3):
                model.train()(3 * x + 1)
        model.eval()
        qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True}), example_inputs=x)
        assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in qmodel.modules())
        torch.testing.assert_close(qmodel(x), model(x), rtol=1e-4, atol=1e-5)

    def test_bn_tuning_raised_on_leaving(self) -> None:
        qmodel = calibrated(Residual().eval(), [torch.randn(IMAGES)], qconfig({"SCHEDULE.BN_TUNING": True}))
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(torch.randn(IMAGES))
        assert qmodel(torch.randn(IMAGES)).isfinite().all()

    @pytest.mark.parametrize("name", ["LSQ", "lsq", "LSQ_plus", "lsq+", "Uniform", "PACT"])
    def test_quantizer_names_were_case_sensitive(self, name: str) -> None:
        qmodel = QuantModel(TwoLayers(), qconfig({"A.QUANTIZER.TYPE": name}))
        assert name.lower().replace("_plus", "+") == site(qmodel, "first.input").TYPE

    def test_submodules_called_twice(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.conv = nn.Linear(6, 6), nn.Conv1d(4, 4, 1)
                self.alias = self.fc

            def forward(self, x: Tensor) -> Tensor:
                return self.alias(self.conv(self.conv(self.fc(x))))

        model, x = Twice().eval(), torch.randn(2, 4, 6)
        assert torch.equal(QuantModel(model, qconfig())(x), model(x))
        qmodel = calibrated(model, [x])
        assert len({name for name in sites(qmodel) if ".input" in name}) == 4
        assert len({name for name in sites(qmodel) if ".weight" in name}) == 2

    def test_dict_tuple_and_keyword_inputs_and_outputs(self) -> None:
        class Nested(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

            def forward(self, batch: dict[str, Tensor], *, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
                first, second = pair
                return {"sum": self.a(batch["x"]) + self.b(first), "rest": (second, [batch["x"].sum()])}

        model = Nested()
        inputs = {"batch": {"x": torch.randn(2, 6)}, "pair": (torch.randn(2, 6), torch.randn(3))}
        qmodel = QuantModel(model, qconfig())
        qmodel.prepare_calibration()
        expected, actual = model(**inputs), qmodel(**inputs)
        assert torch.equal(actual["sum"], expected["sum"]) and torch.equal(actual["rest"][1][0], expected["rest"][1][0])
        qmodel.calc_qparams(asym=True)
        assert sites(qmodel) == {"a.input", "a.weight", "b.input", "b.weight"}

    def test_control_flow_on_shapes_is_a_leaf_and_reported_or_captured(self) -> None:
        class Shapely(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(6, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.fc(x) if x.shape[0] > 1 else x

        model, x = Shapely(), torch.randn(2, 6)
        plain, shown = QuantModel(model, qconfig()), QuantModel(model, qconfig(), example_inputs=x)
        for qmodel in (plain, shown):
            assert torch.equal(qmodel(x), model(x)) and torch.equal(qmodel(x[:1]), model(x[:1]))
            assert sites(qmodel) == {"fc.input", "fc.weight"}
        (report,) = plain.coverage.opaque
        assert "x.shape[0] > 1" in report.line and report.quantized_inside == ("fc",)
        assert shown.coverage.opaque == ()


class Holder(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


def test_simulation_and_reference_agree_to_the_bit() -> None:
    """The root of "simulated accuracy ≠ deployed accuracy": one arithmetic, by definition that of ONNX."""
    qmodel, x = calibrated(TwoLayers(), [torch.randn(64, 6)]), torch.randn(64, 6)
    quantizer = site(qmodel, "first.input")
    codes = reference.quantize(x, quantizer.scale, quantizer.zero_point, UINT8)
    assert torch.equal(quantizer(x), reference.dequantize(codes, quantizer.scale, quantizer.zero_point, UINT8))
