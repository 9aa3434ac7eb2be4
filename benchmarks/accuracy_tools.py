"""What turns a float model into a simulated quantized one: Sparsebit, Brevitas, AIMET, NNCF. One function per variant.

Every tool gets the same calibration batches and the settings that its own examples recommend. Functions return a module
that is called like the float model.
"""

from __future__ import annotations

import copy
import logging
import operator
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.fx
from common import ROOT
from models import Task
from torch import nn


@dataclass(frozen=True)
class Case:
    """A task of `models.TASKS` with so many bits; `weights`: one scale per channel or per tensor."""

    task: str
    weight_bits: int
    activation_bits: int
    weights: str = "per-channel"

    @property
    def bits(self) -> str:
        return f"W{self.weight_bits}A{self.activation_bits}"


@dataclass(frozen=True)
class Tool:
    """`modules` are imported before the clock starts; `settings` says in words what is run."""

    package: str
    settings: str
    quantize: Callable[[Task, Case], nn.Module]
    modules: tuple[str, ...] = ()


def sparsebit(task: Task, case: Case, *, effort: Any = None, algorithm: str = "") -> nn.Module:
    """The benchmark's config with `effort`, or with one of the benchmark's `ALGORITHMS`."""
    from accuracy import ALGORITHMS, config

    from sparsebit import quantize

    observer = "minmax" if case.weight_bits == 8 and effort is None else "mse"
    settings = config("virtual", observer, case.weight_bits, case.activation_bits, weights=case.weights)
    qmodel = quantize(task.model, task.calibration, settings, **({} if effort is None else {"effort": effort}))
    if algorithm:
        ALGORITHMS[algorithm](qmodel, task.calibration)
    return qmodel


def sparsebit_config(task: Task, _: Case, *, file: str) -> nn.Module:
    from sparsebit import quantize
    from sparsebit.quantization import parse_qconfig

    return quantize(task.model, task.calibration, parse_qconfig(ROOT / file).replace("DEVICE", "cpu"))


def brevitas(task: Task, case: Case, *, rounding: str = "gptq", backend: str = "fx") -> nn.Module:
    """The steps of `brevitas_ptq_imagenet_val`, in its order and with its defaults.

    Graph equalization (20 rounds, biases merged), 99.999 % ranges, then GPTQ, GPFQ or Qronos, then bias correction.
    `backend`: "fx" quantizes residual sums too; "layerwise" only what layers read, and gives the first layer 8 bits.
    One default is changed: ReLU6 stays, where the example makes it a ReLU, another function than the model's.
    """
    from brevitas.graph.quantize import preprocess_for_quantize
    from brevitas_examples.imagenet_classification.ptq import ptq_common as steps

    batches = [(batch, None) for batch in task.calibration]
    model = _with_global_pooling(_with_plain_convolutions(copy.deepcopy(task.model)))
    model = preprocess_for_quantize(model, relu6_to_relu=False, equalize_iters=20, equalize_merge_bias=True)
    clipped = [name for name, module in model.named_modules() if isinstance(module, nn.ReLU6)]
    quantized = steps.quantize_model(
        model,
        backend=backend,
        scale_factor_type="float_scale",
        quant_format="int",
        bias_bit_width=32,
        weight_bit_width=case.weight_bits,
        weight_quant_granularity=case.weights.replace("-", "_"),
        act_bit_width=case.activation_bits,
        act_quant_type="sym",  # unsigned where nothing is negative
        act_quant_percentile=99.999,
    )
    for name in clipped if backend == "fx" else ():  # the example's table makes them a QuantReLU without the limit
        quantized.get_submodule(name).act_quant.fused_activation_quant_proxy.activation_impl = nn.ReLU6()
    for node in quantized.graph.nodes:
        if node.target is operator.getitem:  # its quantized tensor is a tuple, and an index would choose of its fields
            node.target = _indexed
    quantized.recompile()
    floats = [node.name for node in quantized.graph.nodes if node.target in (torch.conv2d, nn.functional.linear)]
    assert not floats, f"Brevitas leaves layers that are called as functions in float: {floats[:5]}"
    with torch.no_grad():
        quantized(task.calibration[0])  # initializes the scales
    steps.calibrate(batches, quantized)
    if rounding == "gptq":
        steps.apply_gptq(batches, quantized, create_weight_orig=True)
    elif rounding == "gpfq":
        steps.apply_gpfq(batches, quantized, act_order=False)
    elif rounding == "qronos":
        steps.apply_qronos(quantized, batches)
    steps.apply_bias_correction(batches, quantized)
    return quantized.eval()


def _indexed(values: Any, index: Any) -> Any:
    return (values.value if hasattr(values, "zero_point") else values)[index]


def _with_plain_convolutions(model: nn.Module) -> nn.Module:
    """The model with its convolutions that pad their input first (EfficientNet-Lite0) made `nn.Conv2d`.

    A subclass with a `forward` of its own is traced into, and Brevitas does not quantize the function inside.
    """
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Conv2d) and hasattr(layer, "static_padding"):
                sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, tuple(layer.stride))
                plain = nn.Conv2d(*sizes, 0, layer.dilation, layer.groups, bias=layer.bias is not None)
                plain.weight, plain.bias = layer.weight, layer.bias
                left, right, top, bottom = getattr(layer.static_padding, "padding", (0, 0, 0, 0))
                if left == right and top == bottom:
                    plain.padding = (top, left)
                    setattr(parent, name, plain)
                else:
                    setattr(parent, name, nn.Sequential(layer.static_padding, plain))
    return model.eval()


def _with_global_pooling(model: nn.Module) -> nn.Module:
    """The same model, whose `avg_pool2d(x, x.size(3))` is one over all positions: Brevitas takes no computed size."""
    traced = torch.fx.symbolic_trace(model)
    for node in traced.graph.nodes:
        if node.target is nn.functional.avg_pool2d and isinstance(node.args[1], torch.fx.Node):
            node.target, node.args = nn.functional.adaptive_avg_pool2d, (node.args[0], 1)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def aimet(task: Task, case: Case, *, equalized: bool = False, iterations: int = 0) -> nn.Module:
    """Prepared and batch norms folded as in AIMET's notebooks; then CLE, AdaRound or neither.

    `iterations` of AdaRound: AIMET recommends 15,000 for 4 bits, which takes a CPU two hours for ResNet-20.
    """
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.common import quantsim_config
    from aimet_torch.common.defs import QuantScheme
    from aimet_torch.cross_layer_equalization import equalize_model
    from aimet_torch.model_preparer import prepare_model
    from aimet_torch.quantsim import QuantizationSimModel

    example = task.calibration[0][:1]
    model = prepare_model(copy.deepcopy(task.model)).eval()
    if equalized:
        equalize_model(model, dummy_input=example)  # folds batch norms too
    else:
        fold_all_batch_norms(model, tuple(example.shape), dummy_input=example)
    name = "default_config_per_channel.json" if case.weights == "per-channel" else "default_config.json"
    settings = {
        "quant_scheme": QuantScheme.post_training_tf_enhanced,
        "default_param_bw": case.weight_bits,
        "config_file": str(Path(str(quantsim_config.__file__)).parent / name),
    }
    with tempfile.TemporaryDirectory() as folder:
        if iterations:
            parameters = AdaroundParameters(
                _Inputs(task.calibration), len(task.calibration), default_num_iterations=iterations
            )
            model = Adaround.apply_adaround(
                model,
                example,
                parameters,
                path=folder,
                filename_prefix="adaround",
                default_param_bw=case.weight_bits,
                default_quant_scheme=settings["quant_scheme"],
                default_config_file=settings["config_file"],
            )
        simulated = QuantizationSimModel(model, dummy_input=example, default_output_bw=case.activation_bits, **settings)
        if iterations:
            simulated.set_and_freeze_param_encodings(f"{folder}/adaround.encodings")
        with torch.no_grad():
            simulated.compute_encodings(lambda m: [m(batch) for batch in task.calibration])
    return simulated.model.eval()


class _Inputs(list[Any]):
    """A data loader to AIMET: it asks for `batch_size`."""

    batch_size = 64


def nncf(task: Task, case: Case) -> nn.Module:
    """Defaults; samples one by one, as NNCF wants them; `ModelType.TRANSFORMER`, which smooths, for dict batches."""
    import nncf as tool

    logging.getLogger("nncf").setLevel(logging.WARNING)
    settings: dict[str, Any] = {}
    if isinstance(task.calibration[0], dict):
        settings["model_type"] = tool.ModelType.TRANSFORMER
    samples = [sample for batch in task.calibration for sample in _samples(batch)]
    data = tool.Dataset(samples)
    return tool.quantize(copy.deepcopy(task.model), data, subset_size=len(samples), **settings).eval()


def _samples(batch: Any) -> list[Any]:
    """The samples of a batch, each as a batch of one; padding at the end of a text is cut off."""
    if not isinstance(batch, dict):
        return list(batch.split(1))
    lengths = batch["attention_mask"].sum(1).tolist()
    return [{name: value[i : i + 1, :length] for name, value in batch.items()} for i, length in enumerate(lengths)]


BREVITAS = ("brevitas.graph.quantize", "brevitas_examples.imagenet_classification.ptq.ptq_common")
AIMET = ("aimet_torch.quantsim", "aimet_torch.adaround.adaround_weight", "aimet_torch.model_preparer")
ENCODER = "examples/configs/encoder_w8a8.yaml"
SMOOTHED = "examples/configs/encoder_w8a8_smooth.yaml"

TOOLS: dict[str, Tool] = {
    "float": Tool("sparsebit", "not quantized", lambda task, _: task.model),
    "sparsebit-fast": Tool("sparsebit", 'effort="fast"', partial(sparsebit, effort="fast")),
    "sparsebit-good": Tool("sparsebit", 'effort="good"', partial(sparsebit, effort="good")),
    "sparsebit-best": Tool("sparsebit", 'effort="best"', partial(sparsebit, effort="best")),
    "sparsebit": Tool("sparsebit", "calibration, min-max", sparsebit),
    "sparsebit-equalize": Tool("sparsebit", "min-max, equalize", partial(sparsebit, algorithm="equalization")),
    "sparsebit-encoder": Tool("sparsebit", ENCODER, partial(sparsebit_config, file=ENCODER)),
    "sparsebit-smooth": Tool("sparsebit", SMOOTHED, partial(sparsebit_config, file=SMOOTHED)),
    "brevitas": Tool(
        "brevitas", "graph equalization, bias correction", partial(brevitas, rounding="nearest"), BREVITAS
    ),
    "brevitas-gptq": Tool("brevitas", "graph equalization, GPTQ, bias correction", brevitas, BREVITAS),
    "brevitas-layerwise": Tool(
        "brevitas",
        "graph equalization, GPTQ, bias correction; sums in float, first layer 8 bits",
        partial(brevitas, backend="layerwise"),
        BREVITAS,
    ),
    "brevitas-gpfq": Tool(
        "brevitas", "graph equalization, GPFQ, bias correction", partial(brevitas, rounding="gpfq"), BREVITAS
    ),
    "brevitas-qronos": Tool(
        "brevitas", "graph equalization, Qronos, bias correction", partial(brevitas, rounding="qronos"), BREVITAS
    ),
    "aimet": Tool("aimet_torch", "tf-enhanced ranges", aimet, AIMET),
    "aimet-cle": Tool("aimet_torch", "CLE, tf-enhanced ranges", partial(aimet, equalized=True), AIMET),
    "aimet-adaround": Tool(
        "aimet_torch", "AdaRound with 500 steps, tf-enhanced ranges", partial(aimet, iterations=500), AIMET
    ),
    "nncf": Tool("nncf", "defaults, samples one by one (transformers: SmoothQuant)", nncf, ("nncf", "nncf.torch")),
}
