"""A language model from its downloaded folder to packed weights: quantize, measure packed, convert, generate.

`python examples/llm_quantize.py llama/ -o out/ --text books.txt --heldout heldout.txt --bits 4`; the name of a model on
the Hugging Face hub will do for the folder, and without texts the documentation of Python is taken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from public_data import texts
from transformers import AutoTokenizer

from sparsebit.llm import (
    Calibration,
    Recipe,
    convert,
    load,
    perplexity,
    quantize,
    resident_bytes,
    token_stream,
    windows,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder (config.json, safetensors, tokenizer), or a name on the hub")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--text", type=Path, help="calibration text")
    parser.add_argument("--heldout", type=Path, help="text that measures")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--num-windows", type=int, default=16)
    parser.add_argument("--prompt", default="The ship left the harbour")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    folder = options.model if Path(options.model).is_dir() else snapshot_download(options.model)
    text, heldout_text = options.text, options.heldout
    if text is None or heldout_text is None:
        parts = texts(options.output / "texts")
        text, heldout_text = text or parts[0], heldout_text or parts[1]

    recipe = Recipe(bits=options.bits, group_size=options.group_size, symmetric=True)
    calibration = Calibration(text, num_samples=options.num_samples, length=options.length)
    made = quantize(folder, options.output / "packed", recipe, calibration, device=options.device)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    heldout = windows(token_stream(heldout_text, tokenizer), options.length, options.num_windows)
    record: dict[str, object] = {"bits_per_weight": made.bits_per_weight}
    for name, place in (("float", folder), ("packed", made.folder)):
        model = load(place, device=options.device)
        record[name] = {"perplexity": perplexity(model, heldout).value, "bytes": resident_bytes(model)}

    record["gptq"] = str(convert(made.folder, options.output / "gptq", "gptq").output)

    model = load(made.folder, device=options.device)
    tokens = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(options.device)
    mask = torch.ones_like(tokens)
    written = model.generate(tokens, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
    record["text"] = tokenizer.decode(written[0], skip_special_tokens=True)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
