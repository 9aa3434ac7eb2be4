"""`sparsebit llm quantize`: a language model to a folder of packed weights.

The options are those of the library's dataclasses `Recipe` and `Calibration` (`Annotated[Given, ...]`), so this file
declares only what a run needs besides them. Everything that can fail early (texts, target, held-out text) is read
before the run, which may take hours. Under torchrun only the first process measures and prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import Given, SpeakingOptions, argument, grouped, option
from sparsebit.cli.outputs.output import facts_table, kilobytes, speaking
from sparsebit.cli.outputs.output_names import check_folder_name
from sparsebit.folders import replace_text
from sparsebit.llm.recipe import Calibration, Recipe
from sparsebit.records.model_folders import PERPLEXITY_FILE

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from sparsebit.llm import BitAllocation, EndToEnd, ExpertCalibration, QuantizedModel, ScaledInput

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The model, where to, and the texts: for calibration, and to measure both models at the end."""

    model: str = argument(
        ...,
        "A model folder: config.json, safetensors, tokenizer; or a model of the Hugging Face hub.",
        "DIR|ORG/NAME",
        show_default=False,
    )
    output: llm_options.Output
    text: list[Path] | None = option(
        None,
        "Calibration text: a text file, .jsonl, a folder of these, a dataset; repeat it to mix several kinds.",
        "FILE|DIR",
    )
    heldout: Path | None = option(
        None,
        "Other text: the perplexity of the float and of the packed model on it is measured at the end.",
        "FILE|DIR",
    )
    num_windows: int | None = option(None, "Windows of --heldout, from its beginning, of --length; all.", min=1)

    def calibration(self, drawn: Mapping[str, Any]) -> Calibration | None:
        """`drawn`: the given calibration options; `--length` also applies to the held-out windows."""
        unused = drawn.keys() - ({"length"} if self.heldout is not None else set())
        if not self.text and unused:
            raise typer.BadParameter("without calibration text nothing is drawn of it", param_hint="--text")
        if self.heldout is None and self.num_windows is not None:
            raise typer.BadParameter("only together with --heldout", param_hint="--num-windows")
        return Calibration(self.text, **drawn) if self.text else None


@dataclass(frozen=True)
class RunOptions:
    """How the run computes; only `dtype` changes the result."""

    batch_size: llm_options.BatchSize = 4
    memory_budget: int | None = option(
        None, "MiB of hidden states in memory; the rest is on disk (half of the free memory, 1024 to 8192).", min=1
    )
    device: llm_options.Device = "cpu"
    dtype: str = option("float32", "In which blocks compute: float32; rtn, gptq: bfloat16, float16.", "TYPE")
    no_check: bool = option(False, "Keep the folder without loading it with transformers.")
    revision: str | None = option(None, "For a model of the hub: a branch, tag or commit (main).", "REV")
    trust_remote_code: llm_options.TrustRemoteCode = False
    target: str = option(
        "transformers",
        "Choose groups and zero points so that this runtime stores the bits that are asked for.",
        "llama.cpp|vllm|transformers|genai",
        name="--for",
    )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `sparsebit.llm.quantize`."""
        import torch

        return {
            "batch_size": self.batch_size,
            "memory_budget": None if self.memory_budget is None else self.memory_budget << 20,
            "device": self.device,
            "dtype": getattr(torch, self.dtype),
            "check": not self.no_check,
            "trust_remote_code": self.trust_remote_code,
        }


@grouped
def quantize(
    text: TextOptions,
    recipe: Annotated[Given, Recipe],
    drawn: Annotated[Given, Calibration],
    how: RunOptions,
    say: SpeakingOptions,
) -> None:
    """Quantize the linear layers of a causal language model to 2, 3, 4 or 8 bits.

    Blocks are read, quantized and kept one at a time; a run that was killed continues after its last finished block
    when the same command is given again. The result is a compressed-tensors folder. Before it is kept, plain
    transformers loads it, and its logits must equal those of the packed model.

    sparsebit llm quantize llama/ -o llama-w4/ --text books.txt --bits 4 --group-size 128

    sparsebit llm quantize llama/ -o llama-q4/ --text books.txt --for llama.cpp

    sparsebit llm quantize llama/ -o llama-w8a8/ --text books.txt --bits 8 --activations int8

    sparsebit llm quantize llama/ -o llama-mixed/ --text books.txt --candidate-bits 2,3,4 --average-bits 3.2
    """
    check_folder_name(text.output)
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from sparsebit.llm import quantize as run
        from sparsebit.llm import recipe_for, token_stream, windows
        from sparsebit.llm.converting.targets import need_model
        from sparsebit.llm.models.hub_classes import load_tokenizer
        from sparsebit.llm.models.hub_models import local_folder

        chosen, trust = recipe_for(how.target, **recipe), how.trust_remote_code
        calibration = text.calibration(drawn)
        if how.dtype not in _DTYPES:
            raise typer.BadParameter(f"{how.dtype!r}; allowed: {', '.join(_DTYPES)}", param_hint="--dtype")
        folder = local_folder(text.model, how.revision)
        need_model(how.target, folder, trust_remote_code=trust)
        is_first, kept_back, measured = llm_options.is_first_process(), None, None
        if text.heldout is not None and is_first:  # read first, before hours of work, and cut as `llm eval` does
            tokens = token_stream(text.heldout, load_tokenizer(folder, trust_remote_code=trust))
            kept_back = windows(tokens, drawn.get("length", Calibration.length), text.num_windows)
        out.remark(f"quantizing {text.model} to {_format(chosen)} with {chosen.method}")
        made = run(folder, text.output, chosen, calibration, **how.arguments())
        if kept_back is not None:
            measured = _heldout_perplexities(folder, made.folder, kept_back, how)
            replace_text(made.folder / PERPLEXITY_FILE, json.dumps(measured, indent=1) + "\n")
        if is_first:
            facts = {**_facts(made), "perplexity": _heldout_words(measured), "next": _next(how.target, made)}
            tables = [*_allocation_table(made.allocation), *_experts_table(made.experts), facts_table(facts)]
            out.result({**_record(made), "perplexity": measured}, *tables)


def _format(recipe: Recipe) -> str:
    inputs = "" if recipe.inputs is None else f", inputs in {recipe.activations}"
    if recipe.float_kind is not None:
        return f"{recipe.float_kind} numbers{inputs}"
    kind = "symmetric" if recipe.symmetric else "asymmetric"
    bits = str(recipe.bits)
    if recipe.is_mixed:
        bits = f"{', '.join(map(str, recipe.candidate_bits))} (at most {recipe.average_bits:g} in the mean)"
    size = recipe.group_size
    return f"{bits} bits, {f'groups of {size}' if size else 'one scale per row'}, {kind}{inputs}"


def _record(made: QuantizedModel) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "output": str(made.folder),
        "source": None if made.source is None else asdict(made.source),
        "recipe": asdict(made.recipe),
        "layers": {name: asdict(layer) for name, layer in made.formats.items()},
        "float_bytes": made.float_bytes,
        "packed_bytes": made.packed_bytes,
        "bits_per_weight": made.bits_per_weight,
        "resumed_blocks": made.num_resumed,
        "seconds": made.seconds,
        "check": None if made.check is None else asdict(made.check),
        "experts": {name: asdict(expert) for name, expert in made.experts.items()},
        "calibration_windows": dict(made.calibration_windows),
        "scaled_inputs": {name: asdict(scaled) for name, scaled in made.scaled_inputs.items()},
        "end_to_end": None if made.end_to_end is None else asdict(made.end_to_end),
        "allocation": None if made.allocation is None else json.loads(made.allocation.to_json()),
    }


def _facts(made: QuantizedModel) -> dict[str, str]:
    check, mixed = made.check, made.allocation
    facts = {
        "mixed bits": ""
        if mixed is None
        else f"{mixed.average_bits:.3f} in the mean; loss of a token about {mixed.cost:.3f} nats higher",
        "written": str(made.folder),
        "source": "" if made.source is None else f"{made.source.name} at commit {made.source.revision}",
        "layers": f"{len(made.formats)} linear layers, {made.bits_per_weight:.2f} bits a weight with its scales",
        "experts": _experts(made.experts),
        "scaled inputs": _scaled(made.scaled_inputs),
        "calibration": _calibrated(made.calibration_windows),
        "end to end": _trained(made.end_to_end),
        "cache": "" if made.recipe.kv_cache == "float" else f"keys and values in {made.recipe.kv_cache}",
        "files": f"{kilobytes(made.packed_bytes)} of {kilobytes(made.float_bytes)}",
        "time": f"{made.seconds:.0f} s",
        "continued": f"after {made.num_resumed} finished blocks" if made.num_resumed else "",
    }
    if check is None:
        return facts | {"transformers": "not tried (--no-check)"}
    does_load = "loads it" if check.reader == "transformers" else f"cannot load it; checked by {check.reader}"
    facts["transformers"] = f"{does_load}; logits differ by {check.difference:.1g} of the largest"
    facts["vLLM"] = f"would refuse: {'; '.join(check.vllm)}" if check.vllm else "no rule against it is known; not run"
    return facts


def _calibrated(windows: Mapping[str, int]) -> str:
    """How many windows were drawn from which text."""
    if not windows:
        return ""
    each = ", ".join(f"{count} of {name}" for name, count in windows.items())
    kinds = f"{len(windows)} kinds of text" if len(windows) > 1 else "one kind of text"
    return f"{sum(windows.values())} windows, {kinds}: {each}"


def _trained(found: EndToEnd | None) -> str:
    """The gain of the training end to end."""
    if found is None:
        return ""
    change = f"divergence from the float model {found.before:.3f} to {found.after:.3f} nats"
    kept = f"after {found.kept_step} of {found.steps} steps" if found.kept_step else "not kept, after training"
    return f"{change} on {found.num_held} held-out windows, {kept} on {found.num_windows} others"


def _next(target: str, made: QuantizedModel) -> str:
    """The command that writes the target's file, if the target does not read the folder."""
    from sparsebit.llm.converting.targets import TARGETS

    file_format = TARGETS[target].format
    if file_format is None:
        return ""
    output = made.folder.with_name(f"{made.folder.name}{'.gguf' if file_format == 'gguf' else '-onnx'}")
    return f"sparsebit llm convert {made.folder} -o {output} --to {file_format}"


def _experts(experts: Mapping[str, ExpertCalibration]) -> str:
    if not experts:
        return ""
    few = sum(expert.fallback is not None for expert in experts.values())
    least = min(expert.num_tokens for expert in experts.values())
    words = f"{len(experts)} layers, each with its own Hessian; at least {least} tokens"
    return words if not few else f"{few} of {len(experts)} layers got too few tokens (table above); the rest enough"


def _scaled(inputs: Mapping[str, ScaledInput]) -> str:
    """How many inputs were scaled, and why the others were not."""
    if not inputs:
        return ""
    reasons: dict[str, set[str]] = {}
    for name, scaled in inputs.items():
        if scaled.reason is not None:
            reasons.setdefault(scaled.reason, set()).add(name.split(": ", 1)[1])
    count = sum(scaled.reason is None for scaled in inputs.values())
    others = "".join(f"; not {' or '.join(sorted(names)[:4])}: {reason}" for reason, names in reasons.items())
    return f"{count} of {len(inputs)}{others}"


def _experts_table(experts: Mapping[str, ExpertCalibration]) -> list[Table]:
    """The expert layers that got too few calibration tokens."""
    few = {name: expert for name, expert in experts.items() if expert.fallback is not None}
    if not few:
        return []
    from rich.table import Table

    table = Table("layer of an expert", "tokens", "rounded by")
    for name, expert in few.items():
        table.add_row(name, str(expert.num_tokens), str(expert.fallback))
    return [table]


def _allocation_table(allocation: BitAllocation | None) -> list[Table]:
    """The bits of each layer: a line for each block."""
    if allocation is None:
        return []
    import re

    from rich.table import Table

    bits: dict[str, dict[str, int]] = {}
    for name, layer in allocation.layers.items():
        block, inner = re.fullmatch(r"(.*?\.\d+)\.(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        bits.setdefault(block, {})[inner] = layer.bits
    columns = list(dict.fromkeys(inner for row in bits.values() for inner in row))
    table = Table("bits", *(column.rsplit(".", 1)[-1] for column in columns))
    for block, row in bits.items():
        table.add_row(block.rsplit(".", 1)[-1], *(str(row.get(column, "")) for column in columns))
    return [table]


def _heldout_perplexities(model: Path, packed: Path, tokens: Tensor, how: RunOptions) -> dict[str, Any]:
    """Perplexities of both models; blocks are streamed, so that models larger than the memory are measured too."""
    from sparsebit.llm import load_streamed, perplexity

    loading: dict[str, Any] = {"device": how.device, "trust_remote_code": how.trust_remote_code}
    before, after = (
        perplexity(load_streamed(folder, **loading), tokens, batch_size=how.batch_size) for folder in (model, packed)
    )
    sizes = {"windows": before.num_windows, "length": int(tokens.shape[1])}
    return {"float": before.value, "packed": after.value, **sizes}


def _heldout_words(found: dict[str, Any] | None) -> str:
    """One line for the table."""
    if found is None:
        return ""
    change = found["packed"] / found["float"] - 1
    size = f"{found['windows']} windows of {found['length']} tokens"
    return f"{found['float']:.2f} float, {found['packed']:.2f} packed ({change:+.1%}), {size}"
