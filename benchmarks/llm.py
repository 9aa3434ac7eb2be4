"""Perplexity of book-llama, quantized by `sparsebit.llm` and measured packed, with the CPU time it takes.

`python benchmarks/llm.py --formats 4g128 3g128 2g64`; `SPARSEBIT_DATA` names the data folder. Calibration text is from
the training set; the figure is of the first 60 windows of 512 tokens of the held-out books.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, data_folder

from sparsebit.llm import Calibration, Recipe, load, perplexity, quantize, resident_bytes, token_stream, windows

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["4g128", "3g128", "2g64"], help="BITSgGROUP, e.g. 4g128")
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"], choices=["rtn", "gptq"])
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--num-windows", type=int, default=60)
    options = parser.parse_args()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    data = data_folder()
    source = data / "book_llama"
    heldout = windows(
        token_stream(data / "text" / "books_heldout.txt", AutoTokenizer.from_pretrained(source)),
        512,
        options.num_windows,
    )
    calibration = Calibration(data / "text" / "books_calibration.txt", num_samples=options.num_samples)
    model = load(source)
    floats, size = perplexity(model, heldout).value, resident_bytes(model)
    print(f"float: perplexity {floats:.2f}, {size / 1e6:.1f} MB in memory")
    for name in options.formats:
        bits, group_size = map(int, name.split("g"))
        for method in options.methods:
            recipe = Recipe(method, bits, group_size)
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                made = quantize(source, Path(folder) / "packed", recipe, calibration)
                seconds = time.process_time() - started
                packed = load(made.folder)
                found = perplexity(packed, heldout).value
            print(
                f"W{bits} g{group_size} {method}: perplexity {found:.2f} ({100 * (found / floats - 1):+.2f} %), "
                f"{seconds:.0f} CPU s, {resident_bytes(packed) / 1e6:.1f} MB in memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
