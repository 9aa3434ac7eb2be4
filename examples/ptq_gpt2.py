"""GPT-2 (or another decoder of transformers) with weights and activations at 8 bits: perplexity before and after.

    pip install transformers
    python examples/ptq_gpt2.py gpt2 --text wikitext2_train.txt --heldout wikitext2_test.txt
    python examples/ptq_gpt2.py --tiny

`MODEL` is a folder, or the name of a model on the Hugging Face hub. For 4-bit weights in a folder that is really
smaller, use `sparsebit llm quantize`; this example is `QuantModel` on a language model: both operands of every product
have 8 bits.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from common import CONFIGS
from public_data import sentences
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import sparsebit


def tiny() -> tuple[nn.Module, Tensor, Tensor]:
    """A GPT-2 of two blocks, trained on the letters of Python's documentation, and tokens of two parts of it."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    parts = (torch.tensor([min(ord(letter), 127) for letter in " ".join(sentences(600, part))]) for part in (0, 1))
    train, heldout = (part[: len(part) // 64 * 64].view(-1, 64) for part in parts)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for chosen in torch.randint(len(train), (200, 32)):
        batch = train[chosen]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, train, heldout


def read(name: str, text: Path, heldout: Path, length: int) -> tuple[nn.Module, Tensor, Tensor]:
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)

    def windows(file: Path) -> Tensor:
        tokens = tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        return tokens[: len(tokens) // length * length].view(-1, length)

    return model, windows(text), windows(heldout)


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor, device: str) -> float:
    losses = []
    for batch in windows.to(device).split(8):
        logits = model(input_ids=batch).logits[:, :-1]
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return math.exp(float(torch.cat(losses).double().mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--text", type=Path, help="text for calibration")
    parser.add_argument("--heldout", type=Path, help="text for the perplexity")
    parser.add_argument("--tiny", action="store_true", help="a small GPT-2, trained on the spot: no data is needed")
    parser.add_argument("--config", default=str(CONFIGS / "gpt2_w8a8.yaml"))
    parser.add_argument("--length", type=int, default=512, help="tokens in a window (%(default)s)")
    parser.add_argument("--limit", type=int, default=64, help="windows of each text at most (%(default)s)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the quantized model there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.tiny and not (options.model and options.text and options.heldout):
        parser.error("give MODEL, --text and --heldout, or --tiny")
    model, text, heldout = (
        tiny() if options.tiny else read(options.model, options.text, options.heldout, options.length)
    )
    model.eval()
    model.config.use_cache = False  # the cache of generated tokens is an object that no graph holds

    batches = [{"input_ids": batch} for batch in text[: options.limit].split(4)]
    qmodel = sparsebit.quantize(model, batches, options.config)
    device = qmodel.config.DEVICE
    model.to(device)
    found = {
        "float": perplexity(model, heldout[: options.limit], device),
        "quantized": perplexity(qmodel, heldout[: options.limit], device),
        "layers": str(qmodel.coverage).splitlines()[0],
    }
    if options.save is not None:
        found["saved"] = str(qmodel.save(options.save))
    if options.json:
        print(json.dumps(found))
    else:
        Console().print(f"perplexity {found['float']:.3f} float, {found['quantized']:.3f} quantized; {found['layers']}")


if __name__ == "__main__":
    main()
