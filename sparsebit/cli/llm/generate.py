"""`sparsebit llm generate`: text from a float or packed language model, shown while it is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import SpeakingOptions, grouped, option
from sparsebit.cli.outputs.output import Output, speaking


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The prompt, how tokens are chosen, how many, and whether the chat template is used."""

    model: llm_options.ModelFolder
    prompt: str = option(..., "The text to continue, or what the user says.", short="-p")
    max_new_tokens: int = option(128, "Tokens at most.", min=1)
    temperature: float = option(0.0, "Randomness of sampling; 0: always the likeliest token.", min=0.0)
    seed: int = option(0, "Seed of sampling.", min=0)
    compile_step: bool = option(
        False, "Compile the step of a token first: a minute or more, then faster tokens.", name="--compile"
    )
    chat: bool = option(False, "Put the prompt into the model's chat template.")

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of transformers' `generate`."""
        hot = {"do_sample": True, "temperature": self.temperature}
        # A beam search, which a model's settings may ask for, is not shown while it goes on.
        return {**(hot if self.temperature else {"do_sample": False}), "num_beams": 1}


@grouped
def generate(how: Generation, loading: llm_options.LoadOptions, say: SpeakingOptions) -> None:
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
        tokenizer = load_tokenizer(how.model, trust_remote_code=loading.trust_remote_code)
        tokens = _tokens(tokenizer, how)
        loaded = loading.load(how.model)
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
        seconds, paths = time.perf_counter() - started, kernel_paths(loaded)
        made = given[0, tokens.shape[1] :]
        if say.json:
            times = {"seconds": seconds, "compiling_seconds": compiling, "packed_layers": paths}
            times["kv_cache"] = llm_options.cache_of(loaded)
            text = tokenizer.decode(made, skip_special_tokens=True)
            out.result({"prompt": how.prompt, "text": text, "tokens": len(made), **times})
        words = "; ".join(f"{count} {path}" for path, count in paths.items()) or "none"
        how_run = "blocks were streamed" if loading.single_device else f"packed layers: {words}"
        first = f"compiled in {compiling:.0f} s; " if how.compile_step else ""
        held = f"; {llm_options.cache_of(loaded)} cache"
        out.remark(f"{first}{len(made)} tokens, {len(made) / seconds:.1f} a second; {how_run}{held}")


def _tokens(tokenizer: Any, how: Generation) -> Any:
    from sparsebit.errors import ConfigError
    from sparsebit.llm.models.calibration_text import rendered

    text = how.prompt
    if how.chat:
        text = rendered(tokenizer, [{"role": "user", "content": text}], "--chat", add_generation_prompt=True)
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not how.chat)["input_ids"]
    if not tokens.numel():
        raise ConfigError("--prompt has no tokens; give some text to continue")
    return tokens


def _streamer(tokenizer: Any, out: Output) -> Any:
    """Writes each piece of text to the real standard output as soon as it is complete."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            out.raw(text + ("\n" if stream_end else ""))

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
