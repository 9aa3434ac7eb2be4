from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, CaptureError, ConfigError
from sparsebit.quantization import QuantModel, parse_qconfig
from tests.quantization.tiny import Block, Opaque, Residual, TwoLayers, calibrated, prepared, qconfig, run, site, sites

IMAGES = (2, 3, 8, 8)


class Guarded(nn.Module):
    """Branches on a shape: captured for the example's, other shapes run its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[0] == 2:
            x = x * 1.5
        return {"y": self.norm(self.fc(x)), "x": x}


MODELS = {
    "graph": (Residual, IMAGES),
    "tokens": (Block, IMAGES),
    "opaque": (Opaque, (4, 6)),
    "guarded": (Guarded, (2, 6)),
}


def flat(output: Any) -> Tensor:
    return output["y"] if isinstance(output, dict) else output


@pytest.fixture(params=MODELS, ids=list(MODELS))
def example(request: pytest.FixtureRequest) -> tuple[QuantModel, Tensor]:
    make, shape = MODELS[request.param]
    x = torch.randn(shape)
    qmodel = calibrated(make().eval(), [x], qconfig({"A.QADD.ENABLE_QUANT": True}), example_inputs=x)
    return qmodel, torch.randn(shape)


class TestConstruction:
    def test_the_users_model_is_never_changed(self) -> None:
        model, x = Residual().train(), torch.randn(IMAGES)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        modules = dict(model.named_modules())
        qmodel = calibrated(model, [x], qconfig(backend="onnxruntime"))
        qmodel.train()(x).sum().backward()
        assert model.training and dict(model.named_modules()) == modules
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    @pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
    @pytest.mark.parametrize("with_example", [True, False])
    def test_lazy_layers_are_made_first(self, with_example: bool) -> None:
        model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).eval(), torch.randn(4, 3)
        example = x if with_example else None
        with pytest.raises(CaptureError, match=r"lazy layers.*\(0\.weight, 0\.bias, 1\.weight\); run it once"):
            QuantModel(model, qconfig(), example_inputs=example)
        expected = model(x)
        torch.testing.assert_close(QuantModel(model, qconfig(), example_inputs=example)(x), expected)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    @pytest.mark.parametrize(
        "compile_model", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1, 3))]
    )
    def test_torchscript_is_refused(self, compile_model: Any) -> None:
        with pytest.raises(CaptureError, match=r"TorchScript.*give the nn.Module that it was made from"):
            QuantModel(compile_model(nn.Sequential(nn.Linear(3, 3))), qconfig())

    @pytest.mark.parametrize(
        ("model", "config", "message"),
        [
            (F.relu, qconfig(), "QuantModel takes an nn.Module, not function"),
            (nn.ReLU(), 3, "a config cannot be read from int; allowed: the path of a YAML file, a dict, YAML text"),
        ],
        ids=["function", "number"],
    )
    def test_other_things_are_refused(self, model: Any, config: Any, message: str) -> None:
        with pytest.raises((CaptureError, ConfigError), match=message):
            QuantModel(model, config)

    @pytest.mark.parametrize("form", ["open file", "path"])
    def test_diagrams_go_to_files(self, form: str, tmp_path: Path) -> None:
        qmodel, path = QuantModel(nn.Sequential(nn.Linear(2, 2)), qconfig()), tmp_path / "graph.mmd"
        if form == "path":
            diagram = qmodel.dump_mermaid(path)
        else:
            with path.open("w") as file:
                diagram = qmodel.dump_mermaid(file)
        assert path.read_text() == diagram and "QLinear" in diagram

    def test_the_flow_of_the_spec_verbatim(self) -> None:
        fp32_model = Residual().eval()
        calib_loader = [(torch.randn(IMAGES), torch.zeros(2)) for _ in range(2)]
        qcfg = parse_qconfig("{DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}}}")
        qmodel = QuantModel(fp32_model, qcfg).to(qcfg.DEVICE)
        qmodel.prepare_calibration()
        with torch.no_grad():
            for x, _ in calib_loader:
                qmodel(x.to(qcfg.DEVICE))
        qmodel.calc_qparams(asym=True, w_quant=True, a_quant=True)
        qmodel.set_quant(w_quant=True, a_quant=True)
        x = torch.randn(IMAGES)
        assert F.mse_loss(qmodel(x), fp32_model(x)) < 1e-3 * fp32_model(x).square().mean()

    def test_float_forward_is_the_originals(self) -> None:
        for make, shape in MODELS.values():
            model, x = make().eval(), torch.randn(shape)
            assert torch.equal(flat(QuantModel(model, qconfig()).eval()(x)), flat(model(x)))

    def test_batch_norm_folds_to_the_same_function(self) -> None:
        model, x = Residual().eval(), torch.randn(IMAGES)
        torch.testing.assert_close(QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True}))(x), model(x))

    def test_device_is_obeyed(self) -> None:
        model = TwoLayers().double()
        qmodel = calibrated(model, [torch.randn(4, 6, dtype=torch.float64)])
        tensors = [*qmodel.parameters(), *qmodel.buffers()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}

    @pytest.mark.gpu
    def test_device_is_obeyed_on_a_gpu(self) -> None:
        model, x = Residual().eval(), torch.randn(IMAGES)
        qmodel = calibrated(model, [x.cuda()], qconfig({"DEVICE": "cuda"}), asym=True)
        assert {t.device.type for t in [*qmodel.parameters(), *qmodel.buffers()]} == {"cuda"}
        assert next(model.parameters()).device.type == "cpu"
        torch.testing.assert_close(qmodel(x.cuda()).cpu(), calibrated(model, [x], asym=True)(x), atol=0.05, rtol=0.05)

    @pytest.mark.gpu
    def test_a_model_is_saved_and_loaded_on_a_gpu(self, tmp_path: Path) -> None:
        model, x = Residual().eval(), torch.randn(IMAGES).cuda()
        qmodel = calibrated(model, [x], qconfig({"DEVICE": "cuda"}), asym=True)
        qmodel.save(tmp_path / "saved")
        assert torch.equal(QuantModel.load(tmp_path / "saved", model)(x), qmodel(x))


class TestCopies:
    def test_deepcopy(self, example: tuple[QuantModel, Tensor]) -> None:
        qmodel, x = example
        other = copy.deepcopy(qmodel)
        assert torch.equal(flat(other(x)), flat(qmodel(x)))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        assert not torch.equal(flat(other(x)), flat(qmodel(x)))
        other.set_quant()
        assert qmodel.is_quantized("weight")

    def test_pickle(self, example: tuple[QuantModel, Tensor]) -> None:
        qmodel, x = example
        other = pickle.loads(pickle.dumps(qmodel))
        assert torch.equal(flat(other(x)), flat(qmodel(x)))
        assert sites(other) == sites(qmodel) and str(other.coverage) == str(qmodel.coverage)

    def test_pickle_keeps_the_mode_and_trained_weights(self) -> None:
        qmodel, x = (
            calibrated(TwoLayers(), [torch.randn(4, 6)], qconfig({"A.QUANTIZER.TYPE": "lsq"})),
            torch.randn(4, 6),
        )
        with torch.no_grad():
            qmodel.model.first.op.weight.mul_(0.3)
            site(qmodel, "first.input").scale.mul_(0.7)
        other = pickle.loads(pickle.dumps(qmodel.train()))
        assert other.training and torch.equal(other(x), qmodel(x))

    def test_uncalibrated_models_too(self) -> None:
        qmodel, x = QuantModel(TwoLayers(), qconfig()), torch.randn(4, 6)
        for other in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
            other.prepare_calibration()
            run(other, [x])
            other.calc_qparams()
            assert other(x).shape == (4, 3)


class TestCompilers:
    @pytest.mark.sample(2)
    def test_compile(self, example: tuple[QuantModel, Tensor]) -> None:
        qmodel, x = example
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(qmodel, backend="eager")
            assert torch.equal(flat(compiled(x)), flat(qmodel(x)))

    def test_compile_of_a_graph_is_whole(self) -> None:
        qmodel, x = calibrated(Residual().eval(), [torch.randn(IMAGES)]), torch.randn(IMAGES)
        torch._dynamo.reset()
        with torch.no_grad():
            assert torch.equal(torch.compile(qmodel.model, backend="eager", fullgraph=True)(x), qmodel(x))

    @pytest.mark.parametrize("of", ["QuantModel", "graph"])
    def test_export_sees_the_one_op(self, of: str) -> None:
        qmodel, x = calibrated(Residual().eval(), [torch.randn(IMAGES)]), torch.randn(IMAGES)
        program = torch.export.export(qmodel if of == "QuantModel" else qmodel.model, (x,))
        found = [n for n in program.graph.nodes if n.target is torch.ops.sparsebit.fake_quantize.default]
        assert {node.args[-1] for node in found} == sites(qmodel)
        assert torch.equal(program.module()(x), qmodel(x))

    def test_export_with_a_dynamic_batch(self) -> None:
        qmodel = calibrated(Residual().eval(), [torch.randn(IMAGES)])
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.export.export(qmodel.model, (torch.randn(IMAGES),), dynamic_shapes=({0: batch},))
        x = torch.randn(5, 3, 8, 8)
        assert torch.equal(program.module()(x), qmodel(x))


class TestCalls:
    def test_another_shape_than_the_guards_runs_the_models_code(self, caplog: pytest.LogCaptureFixture) -> None:
        model, x = Guarded().eval(), torch.randn(2, 6)
        qmodel = QuantModel(model, qconfig(), example_inputs=x)
        other = torch.randn(3, 6)
        with caplog.at_level(logging.WARNING, logger="sparsebit"):
            assert torch.equal(qmodel(other)["y"], model(other)["y"])
            qmodel(other)
        assert caplog.text.count("runs the model's own code") == 1

    def test_such_a_batch_counts_in_calibration(self) -> None:
        qmodel = prepared(Guarded().eval(), [torch.randn(3, 6)], example_inputs=torch.randn(2, 6))
        qmodel.calc_qparams()
        assert site(qmodel, "fc.input").is_calibrated

    def test_the_models_code_follows_train_mode(self) -> None:
        class Noisy(Guarded):
            def forward(self, x: Tensor) -> dict[str, Tensor]:
                x = F.dropout(x, 0.5, self.training)
                return super().forward(x)

        qmodel, other = QuantModel(Noisy().eval(), qconfig(), example_inputs=torch.randn(2, 6)), torch.ones(3, 6)
        assert not torch.equal(qmodel.train()(other)["x"], other)
        assert torch.equal(qmodel.eval()(other)["x"], other)

    @pytest.mark.parametrize("is_training", [False, True])
    def test_another_form_keeps_the_mode_of_the_model(self, is_training: bool) -> None:
        class Shifted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(6)

            def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
                return self.norm(x) if shift is None else self.norm(x) + shift

        model, x = Shifted().train(is_training), torch.randn(4, 6)
        qmodel = QuantModel(model, qconfig())
        assert qmodel.training is is_training
        assert torch.equal(qmodel(x, shift=x), copy.deepcopy(model)(x, shift=x))

    def test_another_form_after_calibration_says_what_to_do(self) -> None:
        class Masked(nn.Module):
            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                return torch.sigmoid(x) if mask is None else torch.sigmoid(x) * mask

        qmodel = calibrated(Masked(), [torch.randn(3)])
        with pytest.raises(
            CaptureError, match=r"this call has x, mask, but the model was captured and calibrated for x"
        ):
            qmodel(torch.randn(3), torch.rand(3))

    def test_a_wrong_call_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="argument"):
            QuantModel(TwoLayers(), qconfig())(torch.randn(2, 6), torch.randn(2, 6))

    def test_a_module_registered_twice_is_wrapped_everywhere(self) -> None:
        class Alias(Guarded):
            def __init__(self) -> None:
                super().__init__()
                self.same = self.fc

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                if x.shape[0] == 2:
                    return {"y": self.fc(x)}
                return {"y": self.same(x)}

        x = torch.randn(2, 6)
        qmodel = calibrated(Alias(), [x], qconfig(bits=2), example_inputs=x)
        more = torch.cat([x, x])
        assert torch.equal(qmodel(more)["y"][:2], qmodel(x)["y"])

    def test_train_and_eval_differ_as_in_the_original(self) -> None:
        model = Residual()
        qmodel = QuantModel(model, qconfig())
        x = torch.randn(IMAGES)
        assert torch.equal(qmodel.train()(x), copy.deepcopy(model).train()(x))
        assert not torch.equal(qmodel.train()(x), qmodel.eval()(x))


class TestLookingInside:
    def test_repr_shows_numbers_once_they_are_on(self) -> None:
        qmodel = QuantModel(nn.Sequential(nn.Linear(2, 3)), qconfig())
        assert "(0): QLinear(in_features=2, out_features=3, bias=True, input=uint8 uncalibrated" in repr(qmodel)
        qmodel = calibrated(nn.Sequential(nn.Linear(2, 3)), [torch.tensor([[0.0, 255.0]])])
        assert "input=uint8 scale=1 zero_point=0, weight=int8 scale=[" in repr(qmodel)

    def test_mermaid(self, tmp_path: Path) -> None:
        qmodel = calibrated(Residual().eval(), [torch.randn(IMAGES)], qconfig({"A.QADD.ENABLE_QUANT": True}))
        text = qmodel.dump_mermaid(tmp_path / "graph.mmd")
        assert (tmp_path / "graph.mmd").read_text() == text
        assert text.startswith("flowchart TD\n")
        assert "n_stem_conv" in text and "QIdentity(uint8 scale=" in text and ":::quantized" in text
        assert "n_x --> n_stem_conv" in text

    def test_mermaid_of_several_graphs(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = TwoLayers(), TwoLayers()

            def forward(self, x: Tensor) -> Tensor:
                return self.a(x) if float(x.sum()) > 0 else self.b(x)

        text = QuantModel(Outer(), qconfig()).dump_mermaid()
        assert text.count("flowchart TD") == 2 and "%% a\n" in text and "%% b\n" in text

    def test_mermaid_of_nothing(self) -> None:
        with pytest.raises(CaptureError, match="nothing of this model could be traced"):
            QuantModel(Opaque(), qconfig()).dump_mermaid()

    def test_errors_need_calibration(self) -> None:
        with pytest.raises(CalibrationError, match="needs a calibrated model"):
            QuantModel(TwoLayers(), qconfig()).get_quantization_error(torch.randn(2, 6))
