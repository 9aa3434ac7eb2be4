"""The options of each verb: one frozen dataclass, whose docstring is the text of `sparsebit VERB --help`.

Groups that several verbs share are in `option_groups.py`. Fields become options in their order; those in
`common` come first, without a heading. Importing this file must not load torch: `--help` would take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import typer

from sparsebit.cli.option_groups import (
    DataOptions,
    FileOptions,
    Limits,
    ModelOptions,
    OutputOptions,
    PlacementOptions,
    ScoreOptions,
    SpeakingOptions,
    TrainedModel,
    argument,
    config_option,
    data_option,
    device_option,
    example_option,
    option,
)
from sparsebit.cli.options import Names, read_bits, read_names

NUM_ROWS = 20  # of the table of `profile`


class InputShape(NamedTuple):
    """The value of `--shape`."""

    name: str
    sizes: tuple[int, ...]


def read_shape(text: str) -> InputShape:
    """`x=1x3x224x224`."""
    name, _, sizes = text.rpartition("=")
    parts = sizes.lower().split("x")
    if not name or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: write the input's name and its sizes, image=1x3x224x224")
    return InputShape(name, tuple(map(int, parts)))


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Quantize a model on calibration data and save it.

    A folder is read by QuantModel.load(DIR, model). An .onnx file is run in its runtime and compared with the
    simulation before it is kept, and timed against the float model.

    sparsebit quantize -m torchvision.models:resnet18 -w resnet18.pt -d photos/ --size 224 --resize 256
    --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 -o resnet18-int8.onnx
    """

    common: ClassVar = ("model", "weights", "data", "config", "output")
    heading: ClassVar = "Calibration"

    net: TrainedModel
    data: str | None = data_option(None, " Not needed for -c weights-only.")
    config: str | None = config_option(None, " (the backend of the file's ending; onnxruntime)")
    output: list[Path] = option(
        ..., "A folder to load in Python, or a file for the runtime (.onnx, .pte, .pt2); twice for both.", "DIR|FILE",
        short="-o",
    )  # fmt: skip
    effort: str | None = option(
        None, "Add GPTQ (good: 5 times as long) or reconstruction too (best: minutes).", "fast|good|best"
    )
    asym: bool = option(False, "Calibrate each layer after quantized layers (slower).")
    resume: Path | None = option(None, "Keep finished ALGORITHMS here; run again to continue.", "DIR")
    device: str | None = device_option()
    how: DataOptions = DataOptions()
    placed: PlacementOptions = PlacementOptions()
    scored: ScoreOptions = ScoreOptions()
    written: FileOptions = FileOptions()
    said: OutputOptions = OutputOptions()


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """Find the best file under a goal: what to lose, what to keep.

    The fastest file that keeps the accuracy, or the most accurate one in a budget. Tries quantization, placement,
    ranges, rounding, mixed bits and pruning, step by step, within the minutes. With --test-data, candidates are
    compared with the float model on it by accuracy; without, by agreement with the float model on a part of --data.
    The same command with the same folder continues a run that was stopped.

    sparsebit compress -m my_model:Net -w net.safetensors -d calibration.npz --test-data test.npz --max-loss 0.5 -o run/

    sparsebit compress -m my_model:Net -w net.safetensors -d calibration.npz --budget bytes=0.12 --minutes 30 -o small/
    """

    common: ClassVar = ("model", "weights", "data", "test_data", "max_loss", "budget", "minutes", "output")
    heading: ClassVar = "Goal"

    net: TrainedModel
    data: str = data_option()
    output: Path = option(..., "The folder of the run: the best file, records, all candidates.", "DIR", short="-o")
    target: str = option(
        "onnxruntime",
        "onnxruntime, openvino, tensorrt, qnn, virtual, executorch, litert or aot_inductor.",
        "BACKEND",
        short="-t",
    )
    max_loss: float | None = option(
        None, "The accuracy that may be lost, in points (default: 1, if there is no --budget).", "POINTS", min=0
    )
    budget: list[str] | None = option(
        None, "latency, bytes or macs: latency=0.5 (a share of float), bytes=4MB; may be repeated.", "NAME=LIMIT"
    )
    prefer: str | None = option(None, "What is made small if there is no --budget (latency).", "latency|bytes|macs")
    minutes: float = option(20.0, "How long to search.", "M", min=0.01)
    rungs: Names | None = option(None, "Only these rungs of the ladder.", "NAME,...", parser=read_names)
    how: DataOptions = DataOptions()
    scored: ScoreOptions = ScoreOptions()
    said: SpeakingOptions = SpeakingOptions()


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Show what quantization costs every layer, the worst first.

    Layers are sorted by the SQNR of their outputs (signal to quantization noise in dB; 6 dB are one bit). With --gains,
    also measure the accuracy that returns when each of the worst layers is float.

    Errors are measured against the float model, or, if algorithms (GPTQ, reconstruction) changed the weights, against
    the changed weights; the title says which.

    sparsebit profile -m my_model:Net -w net.safetensors -c config.yaml -d calibration.npz --top 5

    sparsebit profile -m my_model:Net -w net.safetensors -d calibration.npz --gains 5 --test-data test.npz
    """

    common: ClassVar = ("model", "weights", "data", "config", "quantized")
    heading: ClassVar = "Profile"

    net: TrainedModel
    data: str = data_option()
    config: str | None = config_option(None, " (onnxruntime)")
    quantized: Path | None = option(
        None, "A folder that quantize saved, in place of --config, --asym and --device.", "DIR"
    )
    asym: bool = option(False, "Calibrate each layer after quantized layers (slower).")
    device: str | None = device_option()
    sync: bool = option(False, "Quantize all layers together, so that errors add up, not each alone.")
    top: int | None = option(None, f"Layers to show; 0: all (default: {NUM_ROWS}; with --json all).", min=0)
    gains: int | None = option(
        None, "Also measure what each of the N worst layers costs.", min=1, rich_help_panel=ScoreOptions.heading
    )
    scored: ScoreOptions = ScoreOptions()
    how: DataOptions = DataOptions()
    said: OutputOptions = OutputOptions()


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Choose the bits of every layer under budgets; write the config.

    One pass over the data measures what each layer costs at each number of bits; an integer program chooses.

    sparsebit search -m my_model:Net -w net.safetensors -d calibration.npz --budget bytes=0.5
    --candidate-bits 2,3,4,8 -o mixed.yaml

    sparsebit search -m my_model:Net -w net.safetensors -d calibration.npz -c onnxruntime --latency 0.6 -o fast.json
    """

    common: ClassVar = ("model", "weights", "data", "budget", "output")
    heading: ClassVar = "Search"

    net: TrainedModel
    data: str = data_option()
    budget: list[str] | None = option(
        None, "bytes or bops (up to 1: a share), weight_bits or activation_bits; may be repeated.", "NAME=NUMBER"
    )
    output: Path = option(..., "The config to write (.yaml); with --latency a placement (.json).", "FILE", short="-o")
    latency: list[float] | None = option(
        None, "Time of the file here as a share of float: some layers stay float. Repeat for one file each.", "SHARE"
    )
    config: str | None = config_option(None, " (virtual; with --latency onnxruntime)")
    candidate_bits: str | None = option(None, "Bits that a weight may have (2,3,4,6,8).", "N,N,...")
    activation_bits: str | None = option(None, "Bits that an activation may have (the config's).", "N,N,...")
    method: str = option("gradient", "How to judge layers.", "gradient|kl|sqnr")
    device: str | None = device_option()
    how: DataOptions = DataOptions()
    said: SpeakingOptions = SpeakingOptions()


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Remove channels, heads and neurons, and save the smaller model.

    With data, the remaining weights are fitted to the dense model afterwards; no labels are needed. The folder holds
    safetensors and a plan of the channels; sparsebit.sparse.load(DIR, model) makes the smaller model.

    sparsebit prune -m my_model:Net -w net.safetensors -d calibration.npz --budget macs=0.7 -o small/
    """

    common: ClassVar = ("model", "weights", "data", "budget", "output")
    heading: ClassVar = "Pruning"

    net: TrainedModel
    data: str | None = data_option(None)
    budget: list[str] | None = option(
        None, "Limit macs, bytes or latency (measured here); up to 1: a share. May be repeated.", "NAME=NUMBER"
    )
    output: Path = option(..., "The folder of the smaller model; an older result is replaced.", "DIR", short="-o")
    ratio: float | None = option(None, "Remove this share of each group of channels.", "SHARE", min=0, max=1)
    config: str | None = option(None, "What to prune and how (an sconfig.yaml).", "FILE.yaml", short="-c")
    strategy: str | None = option(None, "The criterion, as l1norm or wanda.", "NAME")
    round_to: int | None = option(
        None,
        "Keep widths multiples of this where they were (1; under a budget 16, or 8 or 1 if the budget requires it).",
        min=1,
    )
    no_reconstruct: bool = option(False, "Do not fit the remaining weights.")
    device: str | None = device_option()
    how: DataOptions = DataOptions()
    scored: ScoreOptions = ScoreOptions()
    said: SpeakingOptions = SpeakingOptions()


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Draw the graph with its quantizers as a Mermaid diagram.

    The diagram shows the plan; nothing is calibrated. GitHub, GitLab and mermaid.live render it.

    sparsebit graph -m torchvision.models:resnet18 -c tensorrt -o resnet18.md
    """

    common: ClassVar = ("model", "weights", "data", "config", "output")

    net: ModelOptions
    data: str | None = example_option()
    config: str = config_option("onnxruntime")
    output: Path | None = option(
        None, "A .mmd file, or .md with the diagram in a fence (default: stdout).", "FILE", short="-o"
    )
    said: SpeakingOptions = SpeakingOptions()


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write an ONNX file of a quantized model, or of a float model.

    With --data, the file is run and compared with the model before it is kept. Without it, nothing is compared, and
    the shape of the input is that of one image of --size, or that of the saved model's example.

    sparsebit export -m my_model:Net --quantized quantized/ -d test.npz -o net-int8.onnx

    sparsebit export -m my_model:Net -w net.safetensors --size 224 -o net-float.onnx
    """

    common: ClassVar = ("model", "quantized", "weights", "data", "output")

    folder: Path | None = argument(None, "The same as --quantized DIR.", "[DIR]", hidden=True)
    net: TrainedModel
    quantized: Path | None = option(
        None, "A folder that quantize saved; without it, the float model is exported.", "DIR"
    )
    data: str | None = data_option(None, " The file is compared with the model on it.")
    output: Path = option(..., "The file to write.", "FILE.onnx", short="-o")
    how: DataOptions = DataOptions(num_samples=64)
    scored: ScoreOptions = ScoreOptions()
    written: FileOptions = FileOptions()
    said: OutputOptions = OutputOptions()


@dataclass(frozen=True, kw_only=True)
class SourceModel(TrainedModel):
    """The model that a file comes from; empty: not given."""

    model: str = option(
        "", "Compare with this float model, or with its --quantized folder.", "MODULE:FACTORY", short="-m",
        show_default=False,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Run an ONNX file on real data and compare.

    By default the file is compared with itself, executed node by node as written: this shows whether the runtime's
    rewrites of the graph change the outputs, and fails (exit code 1) if they do. With --model and --quantized the file
    must equal the simulation of the saved model. With --model or --against alone it is compared with the float model
    or file, within the limits that you give.

    sparsebit check net-int8.onnx -m my_model:Net --quantized quantized/ -d test.npz

    sparsebit check model.onnx --against float.onnx -d test.npz --min-top1 0.99
    """

    common: ClassVar = ("data", "against", "model", "quantized", "runtime")
    heading: ClassVar = Limits.heading

    file: Path = argument(..., "The file, of any tool.", "MODEL.onnx")
    data: str = data_option()
    against: Path | None = option(None, "Compare with this float file.", "FLOAT.onnx")
    quantized: Path | None = option(None, "With --model: compare with this folder that quantize saved.", "DIR")
    runtime: str | None = option(
        None, "onnxruntime, openvino or qnn (default: the one the file was exported for).", "NAME", short="-r"
    )
    net: SourceModel = SourceModel()
    limits: Limits = Limits()
    min_top1: float | None = option(None, "Lowest share of samples with the same top-1.", "SHARE", min=0, max=1)
    how: DataOptions = DataOptions(num_samples=64)
    scored: ScoreOptions = ScoreOptions()
    said: OutputOptions = OutputOptions()

    @property
    def saved(self) -> Path | None:
        """The folder of the quantized model; with --model, --against may name it too."""
        return self.quantized or (self.against if self.net.model else None)


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Show which layers of an ONNX file run in integers, and why not. With its time against float.

    Reads the graph that the runtime really executes. Inputs are random: this measures speed, not accuracy.

    sparsebit audit resnet18-int8.onnx

    sparsebit audit model.onnx --against float.onnx --runtime openvino --shape image=1x3x640x640
    """

    common: ClassVar = ("against", "runtime", "shape", "threads", "repeats")

    file: Path = argument(..., "The quantized file, of any tool.", "MODEL.onnx")
    against: Path | None = option(None, "The float file (default: this file without quantization).", "FLOAT.onnx")
    runtime: str = option("onnxruntime", "onnxruntime, openvino or qnn.", "NAME", short="-r")
    shape: list[InputShape] | None = option(
        None, "The shape of an input with open dimensions; may be repeated.", "NAME=NxCxHxW", parser=read_shape
    )
    threads: int = option(1, "Threads; 1 compares CPU time, more compare wall time.", short="-t", min=1)
    repeats: int | None = option(None, "Rounds of timing; 0: none (default: as many as fit in 5 s).", min=0)
    html: Path | None = option(
        None, "Also write the result as a page.", "FILE.html", rich_help_panel=OutputOptions.heading
    )
    said: OutputOptions = OutputOptions()


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write a page about a result: what it costs, why, and each layer.

    One HTML file that loads nothing from elsewhere. RUN: the folder of `compress`, a file that --record wrote, the
    folder of a pruned model or of a quantized language model; several are shown side by side. Nothing is measured.

    sparsebit report run/ -o page.html

    sparsebit report before.json after.json --title "MobileNetV2, 8 and 4 bits"

    sparsebit report run/ --text
    """

    common: ClassVar = ("output", "text", "title")

    runs: list[Path] = argument(..., "What to show: folders and records.", "RUN...")
    output: Path | None = option(None, "The page (default: report.html).", "FILE.html", short="-o")
    text: bool = option(False, "Print the essence instead of writing a page.")
    title: str | None = option(None, "The title of the page (default: the names of the runs).", "TEXT")
    said: SpeakingOptions = SpeakingOptions()


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Train a small CNN on handwritten digits and quantize it. Takes less than a minute.

    The accuracy is measured on images that were used neither for training nor for calibration. At the end the 8-bit
    network is written as an ONNX file, and the file is run: accuracy, size and speed.

    sparsebit demo --bits 8,4 --output demo.onnx
    """

    common: ClassVar = ("bits", "epochs", "seed", "output")

    bits: Any = option("8,6,4,3", "Bits of weights and activations.", "N,N,...", parser=read_bits)
    epochs: int = option(15, "Passes over the training images.", min=1)
    seed: int = option(0, "Seed of the network.", "N")
    output: Path | None = option(None, "Keep the exported file (default: deleted).", "FILE.onnx", short="-o")
    said: SpeakingOptions = SpeakingOptions()


@dataclass(frozen=True, kw_only=True)
class PlannedModel(ModelOptions):
    """The model whose plan is shown; empty: none."""

    model: str = option("", "Also show the plan for this model.", "MODULE:FACTORY", short="-m", show_default=False)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Check a config; with a model, show the plan layer by layer.

    The plan shows what is quantized, what is not and why, and which SPECIFIC entry applies to each layer. A wrong key
    or value is an error (exit code 1) that names the line, what is allowed and the nearest right key.

    sparsebit config check config.yaml -m my_model:Net

    sparsebit config check onnxruntime --full > config.yaml
    """

    common: ClassVar = ("model", "weights", "model_args", "data", "full")

    config: str = argument(..., "A YAML config, or a backend's name.", "FILE|BACKEND")
    net: PlannedModel = PlannedModel()
    data: str | None = example_option()
    full: bool = option(False, "Print the config with every default written out.")
    said: SpeakingOptions = SpeakingOptions()
