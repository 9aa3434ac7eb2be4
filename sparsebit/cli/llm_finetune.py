"""`sparsebit llm finetune` and `sparsebit llm merge`: adapters of a packed language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli import llm_options, options
from sparsebit.cli.output import facts_table, speaking

_ADAPTER, _STEPS = "Adapter", "Steps"


def finetune(
    model: llm_options.ModelFolder,
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="JSON lines: prompt and response, or messages, each.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="A folder that does not exist yet; it appears whole.")
    ],
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a row at most.")] = 512,
    no_packing: Annotated[bool, typer.Option("--no-packing", help="One sample a row.")] = False,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Prompts and responses become messages of the model's template.")
    ] = False,
    too_long: Annotated[
        str, typer.Option("--too-long", metavar="error|cut|drop", help="What happens to samples that fit no row.")
    ] = "error",
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Times that each sample is learned.")] = 1,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Steps at most.")] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Rows of a step, over all processes.", rich_help_panel=_STEPS)
    ] = 16,
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", min=1, help="Rows at once.", rich_help_panel=_STEPS)
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="The highest one.", rich_help_panel=_STEPS)
    ] = 2e-4,
    warmup: Annotated[
        float, typer.Option("--warmup", help="Share of the steps in which it rises.", rich_help_panel=_STEPS)
    ] = 0.03,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="cosine|linear|constant", help="Then.", rich_help_panel=_STEPS)
    ] = "cosine",
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of AdamW.", rich_help_panel=_STEPS)] = 0.0,
    max_grad_norm: Annotated[
        float, typer.Option("--max-grad-norm", help="Gradients are clipped to it; 0: not.", rich_help_panel=_STEPS)
    ] = 1.0,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            metavar="auto|adamw|adamw8bit|paged_adamw8bit",
            help="auto: the paged one on a GPU where bitsandbytes is installed.",
            rich_help_panel=_STEPS,
        ),
    ] = "auto",
    no_checkpointing: Annotated[
        bool,
        typer.Option(
            "--no-checkpointing", help="Keep activations instead of computing blocks again.", rich_help_panel=_STEPS
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of adapters, order and dropout.")] = 0,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the updates.", rich_help_panel=_ADAPTER)] = 16,
    alpha: Annotated[
        int, typer.Option("--alpha", min=1, help="Updates are alpha / rank * B @ A.", rich_help_panel=_ADAPTER)
    ] = 32,
    dropout: Annotated[float, typer.Option("--dropout", help="Of their inputs.", rich_help_panel=_ADAPTER)] = 0.0,
    targets: Annotated[
        str,
        typer.Option(
            "--targets",
            metavar="NAME,NAME",
            help="Layers by the ends of their names, such as q_proj,v_proj; all.",
            rich_help_panel=_ADAPTER,
        ),
    ] = "",
    parallel: Annotated[
        str,
        typer.Option(
            "--parallel",
            metavar="ddp|fsdp|pipeline",
            help="Under torchrun, each process has: the model; a share of each block; some of the blocks.",
        ),
    ] = "ddp",
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between states on disk.")] = 50,
    device: llm_options.Device = "cpu",
    trust_remote_code: llm_options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train LoRA adapters on a model whose weights stay packed (QLoRA).

    Only responses are learned. The state is kept beside the output every so many steps; a run that was killed goes on
    from there when the same command is given again. Under torchrun the rows of a step are split over the processes.

    sparsebit llm finetune llama-w4/ alpaca.jsonl -o adapter/ --length 1024 --device cuda

    torchrun --nproc-per-node 4 -m sparsebit.cli llm finetune llama-w4/ alpaca.jsonl -o adapter/ --device cuda
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import Tuning
        from sparsebit.llm import finetune as run

        wanted: Any = too_long
        way: Any = parallel
        tuning = Tuning(
            rank=rank,
            alpha=alpha,
            dropout=dropout,
            targets=tuple(part.strip() for part in targets.split(",") if part.strip()),
            length=length,
            packing=not no_packing,
            chat_template=chat_template,
            too_long=wanted,
            num_epochs=epochs,
            max_steps=max_steps,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            learning_rate=learning_rate,
            warmup=warmup,
            schedule=schedule,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            optimizer=optimizer,
            gradient_checkpointing=not no_checkpointing,
            seed=seed,
        )
        made = run(
            model,
            data,
            output,
            tuning,
            save_every=save_every,
            device=device,
            parallel=way,
            trust_remote_code=trust_remote_code,
        )
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


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A folder of finetune.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="A folder that does not exist yet; it appears whole.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="packed|bfloat16|float16", help="Rounded again, or in 16 bits.")
    ] = "packed",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="The model of the adapter, if it has moved.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE|DIR", help="Measures perplexity before and after.")
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window of the text.")] = 512,
    num_windows: Annotated[int, typer.Option("--num-windows", min=1, help="Windows of the text.")] = 16,
    trust_remote_code: llm_options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write an adapter and its model as one model, and say what that loses.

    sparsebit llm merge adapter/ -o llama-tuned-w4/ --text heldout.txt

    sparsebit llm merge adapter/ -o llama-tuned/ --to bfloat16
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import merge as run
        from sparsebit.llm import token_stream, windows
        from sparsebit.llm.finetuning.merging import named_base
        from sparsebit.llm.hub_classes import load_tokenizer

        tokens = None
        if text is not None:
            tokenizer = load_tokenizer(model or named_base(adapter), trust_remote_code=trust_remote_code)
            tokens = windows(token_stream(text, tokenizer), length, num_windows)
        made = run(adapter, output, model=model, kind=to, windows=tokens, trust_remote_code=trust_remote_code)
        facts = {
            "written": str(made.folder),
            "layers": f"{made.num_layers} layers took up the adapter, {to}",
            "logits": f"{made.logit_error:.2%} off model and adapter (root mean square)",
            "next token": f"{made.kl_divergence:.2g} nats of divergence",
        }
        if made.perplexity_merged is not None:
            facts["perplexity"] = f"{made.perplexity_with_adapter:.3f} -> {made.perplexity_merged:.3f}"
        out.result(asdict(made) | {"folder": str(made.folder)}, facts_table(facts))
