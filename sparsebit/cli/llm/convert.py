"""`sparsebit llm convert`: a packed language model in another file format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import SpeakingOptions, argument, grouped, option
from sparsebit.cli.outputs.output import facts_table, speaking

if TYPE_CHECKING:
    from sparsebit.llm import ConvertedModel


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The model to convert, and the format."""

    model: Path = argument(
        ..., "A model folder, or a pack32 or pack8 file of the first Sparsebit.", "DIR|FILE", show_default=False
    )
    output: Path = option(..., "A folder or file that does not exist yet; it appears whole.", "OUT", short="-o")
    to: str = option(..., "compressed-tensors, gptq (version 2), gptq-v1, awq, gguf or onnx-genai.", "FORMAT")
    gguf_type: str = option(
        "exact",
        "GGUF: the codes of a packed model as they are, or a packed or float model rounded to it.",
        "exact|Q4_K|Q6_K|Q4_K_M",
    )
    base: Path | None = option(None, "config.json and tokenizer for a file of the first Sparsebit.", "DIR")
    no_check: bool = option(False, "Keep the result without loading it and comparing logits.")
    trust_remote_code: llm_options.TrustRemoteCode = False


@grouped
def convert(asked: Conversion, say: SpeakingOptions) -> None:
    """Write a packed model in another file format; codes and scales stay as they are.

    Before the result is kept, it is loaded, and its logits must equal those of the original. With --gguf-type, weights
    are rounded to a type of llama.cpp, and the resulting change of the logits is reported.

    sparsebit llm convert llama-w4/ -o llama-w4-gptq/ --to gptq

    sparsebit llm convert llama-w4/ -o llama-w4.gguf --to gguf

    sparsebit llm convert llama/ -o llama-q4-k-m.gguf --to gguf --gguf-type Q4_K_M

    sparsebit llm convert llama-7b_234w.pth.tar -o llama-7b-234/ --to compressed-tensors --base llama-7b-hf/
    """
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from sparsebit.llm import convert as run

        how: dict[str, Any] = {"base": asked.base, "trust_remote_code": asked.trust_remote_code}
        made = run(asked.model, asked.output, asked.to, gguf_type=asked.gguf_type, check=not asked.no_check, **how)
        out.result(_record(made), facts_table(_facts(made)))


def _record(made: ConvertedModel) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "output": str(made.output),
        "format": made.format,
        "layers": {name: asdict(layer) for name, layer in made.formats.items()},
        "gguf_types": dict(made.gguf_types),
        "check": None if made.check is None else asdict(made.check),
    }


def _facts(made: ConvertedModel) -> dict[str, str]:
    from collections import Counter

    check = made.check
    layers = f"{len(made.formats)} packed layers as {made.format}" if made.formats else f"float, as {made.format}"
    facts = {"written": str(made.output), "layers": layers}
    if made.gguf_types:
        counts = Counter(made.gguf_types.values()).most_common()
        facts["types"] = ", ".join(f"{count} {kind}" for kind, count in counts)
    if check is None:
        facts["checked"] = "not loaded (--no-check)"
    else:
        facts["checked"] = f"loaded by {check.reader}; logits differ by {check.difference:.1g} of the largest"
        if check.from_source is not None:
            facts["rounded"] = (
                f"weights changed by {check.weight_error:.2%} (root mean square), logits by "
                f"{check.from_source:.1%} of the largest"
            )
        facts["vLLM"] = f"would refuse: {'; '.join(check.vllm)}" if check.vllm else ""
    return facts
