"""The options that the verbs for language models share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli.option_groups import option

ModelFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A model folder: config.json, safetensors, tokenizer.", show_default=False)
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model; off unless given.")
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="A folder that does not exist yet; it appears whole.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Windows of text at once.")]


def cache_of(model: Any) -> str:
    """The kind of a loaded model's cache of keys and values."""
    from sparsebit.llm.caching.packed_cache import packed_cache_kind

    return packed_cache_kind(model) or "float"


def is_first_process() -> bool:
    """Whether this process prints the result: under torchrun only the first process does."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded: whole or streamed, with or without an adapter."""

    adapter: Path | None = option(None, "An adapter of the model, as finetune writes it.", "DIR")
    device: Device = "cpu"
    single_device: bool = option(False, "For models larger than the device: two blocks at a time are in memory.")
    activations: str = option(
        "float32",
        "On a CPU, how far kernels may round the inputs of packed layers; a probe takes the fastest.",
        "float32|bfloat16|int8",
    )
    kv_cache: str = option(
        "folder", "Keys and values in the cache: as the folder says, or of this kind.", "folder|float|int8|fp8|int4"
    )
    trust_remote_code: TrustRemoteCode = False

    def load(self, folder: Path) -> Any:
        from sparsebit.llm import load, load_adapter, load_streamed

        how: dict[str, Any] = {"device": self.device, "trust_remote_code": self.trust_remote_code}
        how["kv_cache"] = self.kv_cache
        if self.single_device:
            wrong = "--adapter" if self.adapter else "--activations" if self.activations != "float32" else None
            if wrong is not None:
                raise typer.BadParameter(f"not together with {wrong}: load it whole", param_hint="--single-device")
            return load_streamed(folder, **how)
        loaded = load(folder, activations=self.activations, **how)
        return loaded if self.adapter is None else load_adapter(loaded, self.adapter).eval()
