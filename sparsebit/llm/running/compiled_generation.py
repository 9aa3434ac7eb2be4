"""Generates with a compiled step, because the Python loop around a token's kernels takes longer than the kernels.

transformers compiles the model's forward of one token for a cache of fixed size, on a GPU with CUDA graphs; the prompt
is read uncompiled. Packed layers are part of the compiled graph, as one operator each.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

_NUM_WARM_UP = 4  # CUDA graphs are recorded in the second and the third call


def compiled_settings(model: Any) -> dict[str, Any]:
    """Arguments of `model.generate` with which the step of a token is compiled, at its first call."""
    from transformers import CompileConfig

    on_cpu = model.device.type == "cpu"
    config: Any = CompileConfig(mode="default" if on_cpu else "reduce-overhead")
    config._compile_all_devices = True  # otherwise transformers does not compile on a CPU
    return {"cache_implementation": "static", "compile_config": config}


@torch.no_grad()
def compile_step(model: Any, tokens: Tensor, max_new_tokens: int) -> float:
    """Generate a few tokens with `compiled_settings`, so that later calls of this size are compiled; in seconds.

    The cache has the size for `max_new_tokens`: the compiled step is for that size only.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AfterAFew(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            is_done = input_ids.shape[1] >= tokens.shape[1] + _NUM_WARM_UP
            return torch.full((len(input_ids),), is_done, device=input_ids.device)

    started = time.perf_counter()
    stopping = StoppingCriteriaList([AfterAFew()])
    how = {"do_sample": False, "pad_token_id": 0, "stopping_criteria": stopping, **compiled_settings(model)}
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens, **how)
    return time.perf_counter() - started
