"""A model that reads images to packed weights: its language part is calibrated with images and text.

`python examples/llm_vision.py smolvlm/ -o smolvlm-w4/ --images photos/ --prompt "Describe the image."`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoProcessor

from sparsebit.llm import Recipe, load, quantize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder (config.json, safetensors, processor)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--images", type=Path, required=True, help="a folder of images")
    parser.add_argument("--prompt", default="Describe the image.")
    parser.add_argument("--num-images", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    options = parser.parse_args()
    processor = AutoProcessor.from_pretrained(options.model)
    files = sorted(path for path in options.images.iterdir() if path.suffix in (".jpg", ".jpeg", ".png"))
    content = [{"type": "image"}, {"type": "text", "text": options.prompt}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    batches = [
        dict(processor(images=[Image.open(file).convert("RGB")], text=prompt, return_tensors="pt"))
        for file in files[: options.num_images]
    ]
    made = quantize(options.model, options.output, Recipe("gptq", 4, options.group_size, symmetric=True), batches)

    model = load(made.folder)
    with torch.no_grad():
        written = model.generate(**batches[0], max_new_tokens=16, do_sample=False)
    text = processor.batch_decode(written[:, batches[0]["input_ids"].shape[1] :], skip_special_tokens=True)[0]
    record = {"layers": len(made.formats), "bits_per_weight": made.bits_per_weight, "text": text}
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
