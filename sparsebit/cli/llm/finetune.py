"""`sparsebit llm finetune` and `sparsebit llm merge`: adapters of a packed language model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import Given, SpeakingOptions, argument, grouped, option
from sparsebit.cli.outputs.output import facts_table, speaking
from sparsebit.cli.outputs.output_names import check_folder_name
from sparsebit.llm.finetuning.tuning import Tuning

if TYPE_CHECKING:
    from sparsebit.llm import MergedModel


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The trained model and its text."""

    model: llm_options.ModelFolder
    data: Path = argument(..., "JSON lines: prompt and response, or messages, each.", "DATA", show_default=False)
    output: llm_options.Output


@dataclass(frozen=True)
class TrainingOptions:
    """How the training runs."""

    parallel: str = option(
        "ddp", "Under torchrun, each process has: the model; a share of each block; some of the blocks.",
        "ddp|fsdp|pipeline",
    )  # fmt: skip
    save_every: int = option(50, "Steps between states on disk.", min=1)
    device: llm_options.Device = "cpu"
    trust_remote_code: llm_options.TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class Merging:
    """The adapter, the text for measuring a merged model, and the text for rounding it."""

    adapter: Path = argument(..., "A folder of finetune.", "ADAPTER", show_default=False)
    output: llm_options.Output
    text: Path | None = option(None, "Measures loss and perplexities.", "FILE|DIR")
    length: int = option(512, "Tokens of a window of the text.", min=2)
    num_windows: int = option(16, "Windows of the text.", min=1)
    calibration: Path | None = option(None, "With --to requantized: GPTQ rounds with it.", "FILE|DIR")
    to: str = option(
        "packed", "Rounded again; quantized again by GPTQ with --calibration; or in 16 bits.",
        "packed|requantized|bfloat16|float16",
    )  # fmt: skip
    model: Path | None = option(None, "The model of the adapter, if it has moved.", "DIR")
    max_loss: float = option(0.1, "Refuse a result that loses a larger share of the adapter's effect.", min=0.0)
    trust_remote_code: llm_options.TrustRemoteCode = False


@grouped
def finetune(asked: TrainingData, tuning: Annotated[Given, Tuning], how: TrainingOptions, say: SpeakingOptions) -> None:
    """Train LoRA adapters on a model whose weights stay packed (QLoRA).

    Only responses are learned. The state is saved in OUTPUT.partial every few steps; if a run is killed, the same
    command continues it from there. Under torchrun the rows of a step are split over the processes.

    sparsebit llm finetune llama-w4/ alpaca.jsonl -o adapter/ --length 1024 --device cuda

    torchrun --nproc-per-node 4 -m sparsebit.cli llm finetune llama-w4/ alpaca.jsonl -o adapter/ --device cuda
    """
    check_folder_name(asked.output)
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import finetune as run

        settings: dict[str, Any] = vars(how)
        made = run(asked.model, asked.data, asked.output, Tuning(**tuning), **settings)
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
def merge(asked: Merging, say: SpeakingOptions) -> None:
    """Write an adapter and its model as one model, and report how much of the adapter's effect is lost.

    sparsebit llm merge adapter/ -o llama-tuned/ --to bfloat16

    sparsebit llm merge adapter/ -o llama-tuned-w4/ --to requantized --calibration books.txt --text heldout.txt
    """
    check_folder_name(asked.output)
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import Calibration, token_stream, windows
        from sparsebit.llm import merge as run
        from sparsebit.llm.finetuning.merging import named_base
        from sparsebit.llm.models.hub_classes import load_tokenizer

        tokens, trust = None, asked.trust_remote_code
        if asked.text is not None:
            tokenizer = load_tokenizer(asked.model or named_base(asked.adapter), trust_remote_code=trust)
            tokens = windows(token_stream(asked.text, tokenizer), asked.length, asked.num_windows)
        made = run(
            *(asked.adapter, asked.output),
            model=asked.model,
            kind=asked.to,
            windows=tokens,
            calibration=None if asked.calibration is None else Calibration(asked.calibration),
            max_loss=asked.max_loss,
            trust_remote_code=trust,
        )
        on = "on arbitrary tokens" if tokens is None else "on the text"
        out.result(asdict(made) | {"folder": str(made.folder)}, facts_table(_merged_facts(made, asked.to, on)))


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
