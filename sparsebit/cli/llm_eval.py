"""`sparsebit llm eval`: the perplexity of a language model; a packed one is measured packed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import llm_options, options
from sparsebit.cli.output import facts_table, kilobytes, speaking


def evaluate(
    model: llm_options.ModelFolder,
    text: Annotated[Path, typer.Option("--text", metavar="FILE|DIR", help="Text that the model was not trained on.")],
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window.")] = 512,
    num_windows: Annotated[
        int | None, typer.Option("--num-windows", min=1, help="Windows from the beginning of the text; all of them.")
    ] = None,
    batch_size: llm_options.BatchSize = 4,
    adapter: llm_options.Adapter = None,
    device: llm_options.Device = "cpu",
    single_device: llm_options.SingleDevice = False,
    activations: llm_options.Activations = "float32",
    trust_remote_code: llm_options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the perplexity of a float or packed model on a text.

    The text is cut into windows one after another; in each one every token but the first is predicted from those in
    front of it. The weights of a packed model stay packed while it is measured.

    sparsebit llm eval llama-w4/ --text heldout.txt --length 2048
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from sparsebit.llm import kernel_paths, perplexity, resident_bytes, stream_usage, token_stream, windows
        from sparsebit.llm.hub_classes import load_tokenizer

        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        tokens = windows(token_stream(text, tokenizer), length, num_windows)
        loaded = llm_options.load_model(
            model,
            adapter=adapter,
            device=device,
            single_device=single_device,
            activations=activations,
            trust_remote_code=trust_remote_code,
        )
        found = perplexity(loaded, tokens, batch_size=batch_size)
        size = resident_bytes(loaded)
        if single_device:
            size += stream_usage(loaded).peak_bytes
        record = {
            "model": str(model),
            "adapter": None if adapter is None else str(adapter),
            "text": str(text),
            "perplexity": found.value,
            "windows": found.num_windows,
            "length": length,
            "predictions": found.num_predictions,
            "resident_bytes": size,
            "packed_layers": kernel_paths(loaded),
        }
        facts = {
            "perplexity": f"{found.value:.3f}",
            "text": f"{text}, {found.num_windows} windows of {length} tokens",
            "in memory": kilobytes(size),
            "packed layers": "; ".join(f"{count} {path}" for path, count in kernel_paths(loaded).items()),
        }
        out.result(record, facts_table(facts))
