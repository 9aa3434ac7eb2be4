from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sparsebit.numerics import reference
from sparsebit.numerics.spec import PerChannel
from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from tests.quantization.tiny import calibrated, prepared, qconfig, site, sites

WEIGHT_ONLY = {"A.QUANTIZER.DISABLE": True}
LAYERS = {
    "lstm": lambda: nn.LSTM(5, 6, batch_first=True),
    "gru": lambda: nn.GRU(5, 6),
    "rnn": lambda: nn.RNN(5, 6, nonlinearity="relu"),
    "two layers": lambda: nn.LSTM(5, 6, num_layers=2, dropout=0.5),
    "both directions": lambda: nn.GRU(5, 6, num_layers=2, bidirectional=True),
    "projection": lambda: nn.LSTM(5, 6, proj_size=3),
    "no bias": lambda: nn.LSTM(5, 6, bias=False),
}


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(5, 5), nn.GRUCell(5, 5), nn.RNNCell(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.rnn(self.gru(hidden))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def rounded(model: nn.Module, qmodel: QuantModel) -> nn.Module:
    """The float model with its weights rounded by hand."""
    result = copy.deepcopy(model)
    owners = {layer.layer: layer for layer in qmodel.model.modules() if isinstance(layer, QuantizedParameter)}
    assert owners
    for module in qmodel.model.modules():
        if isinstance(module, QuantizedParameter):
            quantizer = module.weight_quantizer
            value = reference.fake_quantize(module.parameter, quantizer.scale, quantizer.zero_point, quantizer.spec)
            with torch.no_grad():
                result.get_submodule(module.layer).get_parameter(module.parameter_name).copy_(value)
    return result


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_recurrent_layers_are_rounded_per_row(name: str) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(LAYERS[name]()).eval(), torch.randn(4, 3, 5)
    qmodel = calibrated(model, [x], qconfig({**WEIGHT_ONLY, "W.QUANTIZER.BIT": 4}))
    weights = {f"layer.{n}" for n, p in model.layer.named_parameters() if n.startswith("weight")}
    assert sites(qmodel) == weights
    assert site(qmodel, "layer.weight_ih_l0").spec.granularity == PerChannel(0)
    assert torch.equal(qmodel(x), rounded(model, qmodel)(x))
    assert not torch.equal(qmodel(x), model(x))
    qmodel.set_quant()
    assert torch.equal(qmodel(x), model(x))


def test_cells() -> None:
    model, x = Cells().eval(), torch.randn(3, 5)
    qmodel = calibrated(model, [x], qconfig({**WEIGHT_ONLY, "W.QUANTIZER.BIT": 4}))
    assert len(sites(qmodel)) == 6
    assert torch.equal(qmodel(x), rounded(model, qmodel)(x)) and not torch.equal(qmodel(x), model(x))


def test_packed_sequences() -> None:
    model, x, lengths = Packed().eval(), torch.randn(3, 4, 5), torch.tensor([4, 2, 3])
    qmodel = calibrated(model, [(x, lengths)], qconfig(bits=4), example_inputs=(x, lengths))
    assert torch.equal(qmodel(x, lengths), rounded(model, qmodel)(x, lengths))


def test_coverage_tells_weights_and_what_stays_float() -> None:
    qmodel = QuantModel(nn.Sequential(nn.Linear(5, 5), Recurrent(nn.LSTM(5, 6))), qconfig())
    coverage = qmodel.coverage
    assert (coverage.num_weighted_quantized, coverage.num_weighted) == (2, 2)
    (layer,) = [layer for layer in coverage.quantized if layer.name == "1.layer"]
    assert layer.op == "LSTM" and layer.sites == {"weight.weight_ih_l0": "int8", "weight.weight_hh_l0": "int8"}
    floats = {p.name for p in coverage.parameters if not p.is_quantized}
    assert floats == {"0.bias", "1.layer.bias_ih_l0", "1.layer.bias_hh_l0"}
    assert "LSTM reads 2 quantized weights in its own code: its activations stay float" in coverage.notes


def test_a_disabled_layer_is_counted_as_float() -> None:
    off = [{"layer": ["QUANTIZER.DISABLE", True]}]
    coverage = QuantModel(Recurrent(nn.GRU(5, 6)), qconfig({"W.SPECIFIC": off})).coverage
    assert (coverage.num_weighted_quantized, coverage.num_weighted) == (0, 1)
    assert coverage.parameter_fraction == 0.0 and "QUANTIZER.DISABLE is true in the config" in str(coverage)


def test_saved_loaded_and_moved(tmp_path: Path) -> None:
    model, x = Recurrent(nn.LSTM(5, 6)).eval(), torch.randn(4, 3, 5)
    qmodel = calibrated(model, [x], qconfig(bits=4))
    expected = qmodel(x)
    loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Recurrent(nn.LSTM(5, 6)))
    assert torch.equal(loaded(x), expected)
    assert torch.equal(copy.deepcopy(qmodel)(x), expected)
    loaded.double()
    assert loaded(x.double()).dtype == torch.float64
    loaded.float()
    assert torch.equal(loaded(x), expected)


def test_a_replaced_weight_is_read() -> None:
    model, x = Recurrent(nn.GRU(5, 6)).eval(), torch.randn(4, 3, 5)
    qmodel = calibrated(model, [x])
    before = qmodel(x)
    qmodel.load_state_dict({k: v * 0.5 if k.endswith("weight_ih_l0") else v for k, v in qmodel.state_dict().items()})
    halved = qmodel(x)
    assert not torch.equal(halved, before)
    layer = qmodel.model.get_submodule("layer")
    layer.weight_ih_l0 = nn.Parameter(model.layer.weight_ih_l0.detach().clone())
    assert torch.equal(qmodel(x), before)


def test_training_updates_the_master_weight() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(nn.LSTM(5, 6)).eval(), torch.randn(4, 3, 5)
    qmodel = prepared(model, [x], qconfig(bits=4))
    qmodel.init_QAT()
    qmodel.train()
    optimizer = torch.optim.SGD(qmodel.parameters(), 0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (qmodel(x) - 0.1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not torch.equal(qmodel.model.get_submodule("layer")._parameters["weight_hh_l0"], model.layer.weight_hh_l0)


def test_threads_share_a_model() -> None:
    model, x = Recurrent(nn.LSTM(5, 6)).eval(), torch.randn(4, 3, 5)
    qmodel = calibrated(model, [x], qconfig(bits=4))
    expected, master = qmodel(x), model.layer.weight_ih_l0.detach().clone()
    wrong: list[int] = []

    def work() -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not torch.equal(qmodel(x), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(qmodel.model.get_submodule("layer")._parameters["weight_ih_l0"], master)


def test_the_class_stays_what_it_was() -> None:
    qmodel = QuantModel(Recurrent(nn.LSTM(5, 6)), qconfig())
    layer = qmodel.model.get_submodule("layer")
    assert isinstance(layer, nn.LSTM) and type(layer).__name__ == "LSTM"
    assert isinstance(layer.weight_ih_l0, nn.Parameter)  # while quantization is off
    assert len(layer.all_weights[0]) == 4
