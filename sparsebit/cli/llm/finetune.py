"""`sparsebit llm finetune` and `sparsebit llm merge`: adapters of a packed language model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import Given, SpeakingOptions, grouped
from sparsebit.cli.outputs.output import facts_table, speaking
from sparsebit.cli.outputs.output_names import check_folder_name
from sparsebit.llm.finetuning.tuning import Tuning

if TYPE_CHECKING:
    from sparsebit.llm import MergedModel


@dataclass(frozen=True)
class TrainingOptions:
    """How the training runs."""

    parallel: Annotated[
        str,
        typer.Option(
            "--parallel",
            metavar="ddp|fsdp|pipeline",
            help="Under torchrun, each process has: the model; a share of each block; some of the blocks.",
        ),
    ] = "ddp"
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between states on disk.")] = 50
    device: llm_options.Device = "cpu"
    trust_remote_code: llm_options.TrustRemoteCode = False


@dataclass(frozen=True)
class MergeText:
    """The text for measuring a merged model, and the text for rounding it."""

    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE|DIR", help="Measures loss and perplexities."),
    ] = None
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window of the text.")] = 512
    num_windows: Annotated[int, typer.Option("--num-windows", min=1, help="Windows of the text.")] = 16
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE|DIR", help="With --to requantized: GPTQ rounds with it."),
    ] = None


@grouped
def finetune(
    model: llm_options.ModelFolder,
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="JSON lines: prompt and response, or messages, each.", show_default=False),
    ],
    output: llm_options.Output,
    tuning: Annotated[Given, Tuning],
    how: TrainingOptions,
    say: SpeakingOptions,
) -> None:
    """Train LoRA adapters on a model whose weights stay packed (QLoRA).

    Only responses are learned. The state is kept in OUTPUT.partial every so many steps; a run that was killed goes on
    from there when the same command is given again. Under torchrun the rows of a step are split over the processes.

    sparsebit llm finetune llama-w4/ alpaca.jsonl -o adapter/ --length 1024 --device cuda

    torchrun --nproc-per-node 4 -m sparsebit.cli llm finetune llama-w4/ alpaca.jsonl -o adapter/ --device cuda
    """
    check_folder_name(output)
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import finetune as run

        settings: dict[str, Any] = vars(how)
        made = run(model, data, output, Tuning(**tuning), **settings)
        if not llm_options.is_first_process():
            return
        record = asdict(made) | {"folder": str(made.folder)}
        facts = {
            "written": str(made.folder),
            "loss": f"{made.losses[0]:.4f} -> {made.losses[-1]:.4f} in {len(made.losses)} steps",
            "data": f"{made.num_samples} samples, {made.num_learned} tokens learned",
            "adapter": f"{made.num_parameters} parameters, {made.optimizer}",
            "continued": f"after {made.num_resumed} steps" if made.num_resumed else "",
            "time": f"{made.seconds:.0f} s",
        }
        out.result(record, facts_table(facts))


@grouped
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A folder of finetune.", show_default=False)],
    output: llm_options.Output,
    measured: MergeText,
    say: SpeakingOptions,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="packed|requantized|bfloat16|float16",
            help="Rounded again; quantized again by GPTQ with --calibration; or in 16 bits.",
        ),
    ] = "packed",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="The model of the adapter, if it has moved.")
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option("--max-loss", min=0.0, help="Refuse a result that loses a larger share of the adapter's effect."),
    ] = 0.1,
    trust_remote_code: llm_options.TrustRemoteCode = False,
) -> None:
    """Write an adapter and its model as one model, and report how much of the adapter's effect is lost.

    sparsebit llm merge adapter/ -o llama-tuned/ --to bfloat16

    sparsebit llm merge adapter/ -o llama-tuned-w4/ --to requantized --calibration books.txt --text heldout.txt
    """
    check_folder_name(output)
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import Calibration, token_stream, windows
        from sparsebit.llm import merge as run
        from sparsebit.llm.finetuning.merging import named_base
        from sparsebit.llm.models.hub_classes import load_tokenizer

        tokens = None
        if measured.text is not None:
            tokenizer = load_tokenizer(model or named_base(adapter), trust_remote_code=trust_remote_code)
            tokens = windows(token_stream(measured.text, tokenizer), measured.length, measured.num_windows)
        made = run(
            adapter,
            output,
            model=model,
            kind=to,
            windows=tokens,
            calibration=None if measured.calibration is None else Calibration(measured.calibration),
            max_loss=max_loss,
            trust_remote_code=trust_remote_code,
        )
        on = "on arbitrary tokens" if tokens is None else "on the text"
        out.result(asdict(made) | {"folder": str(made.folder)}, facts_table(_merged_facts(made, to, on)))


def _merged_facts(made: MergedModel, to: str, on: str) -> dict[str, str]:
    """`on`: what the effect of the adapter was measured on."""
    lost = "the adapter changes nothing" if made.update_lost is None else f"{made.update_lost:.1%}"
    facts = {
        "written": str(made.folder),
        "layers": f"{made.num_layers} layers took up the adapter, {to}",
        "effect of the adapter lost": f"{lost} ({on})",
        "logits": f"{made.logit_error:.2%} off model and adapter (root mean square)",
        "next token": f"{made.kl_divergence:.2g} nats of divergence",
    }
    if made.perplexity_merged is not None:
        facts["perplexity"] = f"{made.perplexity_with_adapter:.3f} -> {made.perplexity_merged:.3f}"
    return facts
