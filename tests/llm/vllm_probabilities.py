"""Run by `test_vllm.py` in a process of its own: prints the log probabilities that vLLM gives the tokens of prompts.

python vllm_probabilities.py FOLDER PROMPTS OUTPUT DTYPE, prompts and output JSON files.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: str, prompts: str, output: str, dtype: str) -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    model = LLM(folder, dtype=dtype, max_model_len=64, enforce_eager=True, skip_tokenizer_init=True)
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
    how = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    found = [
        [next(iter(place.values())).logprob for place in answer.prompt_logprobs[1:]]
        for answer in model.generate(asked, how)
    ]
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
