"""`sparsebit llm quantize`: a language model to a folder of packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import llm_heldout, llm_options, options
from sparsebit.cli.output import facts_table, kilobytes, speaking
from sparsebit.cli.verb import Verb

if TYPE_CHECKING:
    from rich.table import Table

    from sparsebit.llm import BitAllocation, ExpertCalibration, QuantizedModel, Recipe, ScaledInput

_TUNE = "Method"
_DTYPES = ("float32", "bfloat16", "float16")


def quantize(
    model: llm_options.ModelFolder,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="A folder that does not exist yet; it appears whole.")
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE|DIR", help="Calibration text: a text file, .jsonl, a folder of these, a dataset."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", metavar="METHOD", help="rtn, gptq, awq, autoround, fp8, mxfp4 or nvfp4.")
    ] = "gptq",
    bits: Annotated[int | None, typer.Option("--bits", metavar="2|3|4|8", help="Bits of a weight (4).")] = None,
    candidate_bits: Annotated[
        str | None,
        typer.Option("--candidate-bits", metavar="N N ...", help="Mixed bits: each layer gets one of these."),
    ] = None,
    average_bits: Annotated[
        float | None,
        typer.Option("--average-bits", help="Mixed bits: at most so many in the mean, scales not counted."),
    ] = None,
    group_size: Annotated[
        int, typer.Option("--group-size", min=0, help="Columns that share a scale; 0: one scale per row.")
    ] = 128,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Without zero points.")] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate hidden states by Hadamard blocks of a group, folded into weights.")
    ] = False,
    num_samples: Annotated[
        int | None, typer.Option("--num-samples", min=1, help="Windows of calibration text (64).")
    ] = None,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Tokens of a window (512).")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Which windows are drawn (0).")] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="The text is JSON lines with `messages`; use the model's template.")
    ] = False,
    heldout: Annotated[
        Path | None,
        typer.Option(
            "--heldout",
            metavar="FILE|DIR",
            help="Other text: the perplexity of the float and of the packed model on it is measured at the end.",
        ),
    ] = None,
    num_windows: Annotated[
        int | None,
        typer.Option("--num-windows", min=1, help="Windows of --heldout, from its beginning, of --length; all."),
    ] = None,
    scale_search: Annotated[
        str,
        typer.Option(
            "--scale-search",
            metavar="none|nearest|gptq",
            help="How each scale is judged: not, by rounding to nearest, by GPTQ.",
            rich_help_panel=_TUNE,
        ),
    ] = "nearest",
    no_act_order: Annotated[
        bool, typer.Option("--no-act-order", help="gptq: columns in their own order.", rich_help_panel=_TUNE)
    ] = False,
    damping: Annotated[
        float | None, typer.Option("--damping", min=0.0, help="gptq: of the Hessian (0.01).", rich_help_panel=_TUNE)
    ] = None,
    no_refit: Annotated[
        bool, typer.Option("--no-refit", help="gptq: scales are not fitted to the codes.", rich_help_panel=_TUNE)
    ] = False,
    sweeps: Annotated[
        int | None,
        typer.Option("--sweeps", min=0, help="gptq: how often codes are improved (2).", rich_help_panel=_TUNE),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="autoround: of learning, for each block (200).", rich_help_panel=_TUNE),
    ] = None,
    input_correction: Annotated[
        float | None,
        typer.Option(
            "--input-correction",
            min=0.0,
            max=1.0,
            help="gptq: how much of the error of earlier layers the weight takes up (1).",
            rich_help_panel=_TUNE,
        ),
    ] = None,
    batch_size: llm_options.BatchSize = 4,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            "--memory-budget",
            min=1,
            help="MiB of hidden states in memory; the rest is on disk (half of the free memory, 1024 to 8192).",
        ),
    ] = None,
    device: llm_options.Device = "cpu",
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="TYPE", help="In which blocks compute: float32; rtn, gptq: bfloat16, float16."),
    ] = "float32",
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Keep the folder without loading it with transformers.")
    ] = False,
    trust_remote_code: llm_options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize the linear layers of a causal language model to 2, 3, 4 or 8 bits.

    Blocks are read, quantized and kept one at a time; a run that was killed continues after its last finished block
    when the same command is given again. The result is a compressed-tensors folder. Before it is kept, plain
    transformers loads it, and its logits have to be those of the packed model.

    sparsebit llm quantize llama/ -o llama-w4/ --text books.txt --bits 4 --group-size 128

    sparsebit llm quantize llama/ -o llama-mixed/ --text books.txt --candidate-bits 2 3 4 --average-bits 3.2
    """
    with speaking(as_json=json, quiet=quiet) as out:
        import torch

        from sparsebit.llm import Calibration, Recipe
        from sparsebit.llm import quantize as run

        tuned: dict[str, Any] = {
            "damping": damping,
            "sweeps": sweeps,
            "steps": steps,
            "input_correction": input_correction,
            "act_order": False if no_act_order else None,
            "refit": False if no_refit else None,
        }
        formats: dict[str, Any] = {"method": method, "scale_search": scale_search, "rotate": rotate}
        formats |= _given({"bits": bits, "average_bits": average_bits})
        if candidate_bits is not None:
            formats["candidate_bits"] = tuple(dict.fromkeys(options.read_bits(candidate_bits)))
        recipe = Recipe(**formats, group_size=group_size, symmetric=symmetric, **_given(tuned))
        drawn = _given({"num_samples": num_samples, "length": length, "seed": seed})
        of_text = {name for name in drawn if name != "length" or heldout is None}
        if text is None and (of_text or chat_template):
            raise typer.BadParameter("without calibration text nothing is drawn of it", param_hint="--text")
        if heldout is None and num_windows is not None:
            raise typer.BadParameter("only together with --heldout", param_hint="--num-windows")
        if dtype not in _DTYPES:
            raise typer.BadParameter(f"{dtype!r}; allowed: {', '.join(_DTYPES)}", param_hint="--dtype")
        calibration = None if text is None else Calibration(text, chat_template=chat_template, **drawn)
        is_first, kept_back = llm_options.is_first_process(), None
        if heldout is not None and is_first:
            kept_back = llm_heldout.heldout_windows(
                model, heldout, length or Calibration.length, num_windows, trust_remote_code=trust_remote_code
            )
        out.remark(f"quantizing {model} to {_format(recipe)} with {method}")
        made = run(
            model,
            output,
            recipe,
            calibration,
            batch_size=batch_size,
            memory_budget=None if memory_budget is None else memory_budget << 20,
            device=device,
            dtype=getattr(torch, dtype),
            check=not no_check,
            trust_remote_code=trust_remote_code,
        )
        tables = [*_allocation_table(made.allocation), *_experts_table(made.experts)]
        measured = None
        if kept_back is not None:
            measured = llm_heldout.heldout_perplexities(
                *(model, made.folder, kept_back),
                batch_size=batch_size,
                device=device,
                trust_remote_code=trust_remote_code,
            )
        if is_first:
            facts = {**_facts(made), "perplexity": llm_heldout.told(measured)}
            out.result({**_record(made), "perplexity": measured}, *tables, facts_table(facts))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _format(recipe: Recipe) -> str:
    if recipe.float_kind is not None:
        return f"{recipe.float_kind} numbers"
    kind = "symmetric" if recipe.symmetric else "asymmetric"
    bits = str(recipe.bits)
    if recipe.is_mixed:
        bits = f"{', '.join(map(str, recipe.candidate_bits))} (at most {recipe.average_bits:g} in the mean)"
    size = recipe.group_size
    return f"{bits} bits, {f'groups of {size}' if size else 'one scale per row'}, {kind}"


def _record(made: QuantizedModel) -> dict[str, Any]:
    import json
    from dataclasses import asdict

    return {
        "output": str(made.folder),
        "recipe": asdict(made.recipe),
        "layers": {name: asdict(layer) for name, layer in made.formats.items()},
        "float_bytes": made.float_bytes,
        "packed_bytes": made.packed_bytes,
        "bits_per_weight": made.bits_per_weight,
        "resumed_blocks": made.num_resumed,
        "seconds": made.seconds,
        "check": None if made.check is None else asdict(made.check),
        "experts": {name: asdict(expert) for name, expert in made.experts.items()},
        "scaled_inputs": {name: asdict(scaled) for name, scaled in made.scaled_inputs.items()},
        "allocation": None if made.allocation is None else json.loads(made.allocation.to_json()),
    }


def _facts(made: QuantizedModel) -> dict[str, str]:
    check = made.check
    facts = {
        "mixed bits": _mixed(made.allocation),
        "written": str(made.folder),
        "layers": f"{len(made.formats)} linear layers, {made.bits_per_weight:.2f} bits a weight with its scales",
        "experts": _experts(made.experts),
        "scaled inputs": _scaled(made.scaled_inputs),
        "files": f"{kilobytes(made.packed_bytes)} of {kilobytes(made.float_bytes)}",
        "time": f"{made.seconds:.0f} s",
        "continued": f"after {made.num_resumed} finished blocks" if made.num_resumed else "",
    }
    if check is None:
        return facts | {"transformers": "not tried (--no-check)"}
    facts["transformers"] = f"loads it; logits differ by {check.difference:.1g} of the largest"
    facts["vLLM"] = f"would refuse: {'; '.join(check.vllm)}" if check.vllm else "no rule against it is known; not run"
    return facts


def _mixed(allocation: BitAllocation | None) -> str:
    if allocation is None:
        return ""
    return f"{allocation.average_bits:.3f} in the mean; loss of a token about {allocation.cost:.3f} nats higher"


def _experts(experts: Mapping[str, ExpertCalibration]) -> str:
    if not experts:
        return ""
    few = sum(expert.fallback is not None for expert in experts.values())
    least = min(expert.num_tokens for expert in experts.values())
    words = f"{len(experts)} layers, each with its own Hessian; at least {least} tokens"
    return words if not few else f"{few} of {len(experts)} layers got too few tokens (table above); the rest enough"


def _scaled(inputs: Mapping[str, ScaledInput]) -> str:
    """How many inputs were scaled, and why others were not."""
    if not inputs:
        return ""
    reasons: dict[str, set[str]] = {}
    for name, scaled in inputs.items():
        if scaled.reason is not None:
            reasons.setdefault(scaled.reason, set()).add(name.split(": ", 1)[1])
    count = sum(scaled.reason is None for scaled in inputs.values())
    told = "".join(f"; not {' or '.join(sorted(names)[:4])}: {reason}" for reason, names in reasons.items())
    return f"{count} of {len(inputs)}{told}"


def _experts_table(experts: Mapping[str, ExpertCalibration]) -> list[Table]:
    """The layers of experts that too few calibration tokens reached."""
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


class QuantizeVerb(Verb):
    """Takes `--candidate-bits 2 3 4` as well as `--candidate-bits 2,3,4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _joined(args))


def _joined(args: list[str]) -> list[str]:
    """The whole numbers behind `--candidate-bits` as one word.

    >>> _joined(["m", "--candidate-bits", "2", "3", "4", "--quiet"])
    ['m', '--candidate-bits', '2,3,4', '--quiet']
    """
    found: list[str] = []
    for word in args:
        is_number = word.isdecimal() and len(word) == 1
        if is_number and len(found) > 1 and found[-2] == "--candidate-bits":
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found
