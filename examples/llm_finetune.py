"""QLoRA on packed weights: train an adapter on instructions, answer with it, merge it into a model in 16 bits.

`python examples/llm_finetune.py llama-w4/ alpaca.jsonl -o out/ --length 1024 --device cuda`, or with several processes
`torchrun --nproc-per-node 2 -m sparsebit.cli llm finetune ...`, which is the same training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from sparsebit.llm import Tuning, finetune, load, load_adapter, merge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder of `sparsebit llm quantize`")
    parser.add_argument("data", type=Path, help="JSON lines with prompt and response, or messages")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--prompt", default="Name three rivers.")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    tuning = Tuning(
        length=options.length,
        num_epochs=options.epochs,
        rank=options.rank,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
    )
    made = finetune(options.model, options.data, options.output / "adapter", tuning, device=options.device)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tuned = load_adapter(load(options.model, device=options.device), made.folder).eval()
    tokens = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(options.device)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        written = tuned.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0
        )

    # Packed again by rounding to nearest, most of a small update would be lost, which `merge` refuses.
    merged = merge(made.folder, options.output / "merged", model=options.model, kind="float16")
    record = {
        "losses": made.losses,
        "text": tokenizer.decode(written[0], skip_special_tokens=True),
        "merged": {"folder": str(merged.folder), "logit_error": merged.logit_error},
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
