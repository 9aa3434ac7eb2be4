"""`sparsebit llm generate`: text from a float or packed language model, shown while it is generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import SpeakingOptions, grouped
from sparsebit.cli.outputs.output import Output, speaking


@dataclass(frozen=True)
class TokenOptions:
    """How tokens are chosen, how many, and whether the prompt uses the chat template."""

    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens at most.")] = 128
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Randomness of sampling; 0: always the likeliest token.")
    ] = 0.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of sampling.")] = 0
    compile_step: Annotated[
        bool,
        typer.Option("--compile", help="Compile the step of a token first: a minute or more, then faster tokens."),
    ] = False
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of transformers' `generate`."""
        hot = {"do_sample": True, "temperature": self.temperature}
        # A beam search, which a model's settings may ask for, is not shown while it goes on.
        return {**(hot if self.temperature else {"do_sample": False}), "num_beams": 1}


@grouped
def generate(
    model: llm_options.ModelFolder,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue, or what the user says.")],
    how: TokenOptions,
    loading: llm_options.LoadOptions,
    say: SpeakingOptions,
) -> None:
    """Generate text; the weights of a packed model stay packed.

    sparsebit llm generate llama-w4/ -p "The ship left the harbour" --max-new-tokens 64
    """
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        import time

        import torch

        from sparsebit.errors import ConfigError
        from sparsebit.llm import kernel_paths
        from sparsebit.llm.models.calibration_text import need_embeddings, need_positions
        from sparsebit.llm.models.hub_classes import load_tokenizer
        from sparsebit.llm.running import compiled_generation

        if how.compile_step and loading.single_device:
            raise ConfigError("--compile needs the whole model on the device; leave --compile or --single-device out")
        tokenizer = load_tokenizer(model, trust_remote_code=loading.trust_remote_code)
        tokens = _tokens(tokenizer, model, prompt, how)
        loaded = loading.load(model)
        need_embeddings(tokens, loaded)
        need_positions(tokens.shape[1] + how.max_new_tokens - 1, loaded, "--prompt, --max-new-tokens")
        tokens = tokens.to(loading.device)
        settings, compiling = how.sampling(), 0.0
        if how.compile_step:
            compiling = compiled_generation.compile_step(loaded, tokens, how.max_new_tokens)
            settings |= compiled_generation.compiled_settings(loaded)
        torch.manual_seed(how.seed)
        started = time.perf_counter()
        given = loaded.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=how.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            streamer=None if say.json else _streamer(tokenizer, out),
            **settings,
        )
        seconds = time.perf_counter() - started
        paths = kernel_paths(loaded)
        made = given[0, tokens.shape[1] :]
        if say.json:
            out.result(
                {
                    "prompt": prompt,
                    "text": tokenizer.decode(made, skip_special_tokens=True),
                    "tokens": len(made),
                    "seconds": seconds,
                    "compiling_seconds": compiling,
                    "packed_layers": paths,
                }
            )
        how_run = "blocks were streamed" if loading.single_device else f"packed layers: {_words(paths)}"
        first = f"compiled in {compiling:.0f} s; " if how.compile_step else ""
        out.remark(f"{first}{len(made)} tokens, {len(made) / seconds:.1f} a second; {how_run}")


def _tokens(tokenizer: Any, model: Path, prompt: str, how: TokenOptions) -> Any:
    from sparsebit.errors import ConfigError

    if how.chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"--chat: the tokenizer of {model} has no chat template; leave --chat out")
    text = _asked(tokenizer, prompt) if how.chat else prompt
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not how.chat)["input_ids"]
    if not tokens.numel():
        raise ConfigError("--prompt has no tokens; give some text to continue")
    return tokens


def _asked(tokenizer: Any, prompt: str) -> str:
    """The prompt in the model's chat template."""
    from sparsebit.errors import ConfigError

    messages = [{"role": "user", "content": prompt}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise any kind of exception
        raise ConfigError(f"--chat: the model's chat template refuses the prompt ({error})") from error


def _words(paths: dict[str, int]) -> str:
    return "; ".join(f"{count} {path}" for path, count in paths.items()) or "none"


def _streamer(tokenizer: Any, out: Output) -> Any:
    """Writes each piece of text to the real standard output as soon as it is complete."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            out.raw(text + ("\n" if stream_end else ""))

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
