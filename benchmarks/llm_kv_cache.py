"""A packed cache of keys and values: perplexity, divergence, bytes and time of a decoded token, in one run.

    python benchmarks/llm_kv_cache.py MODEL_DIR --calibration TEXT --heldout TEXT [--lengths 1024 2048:4 8192:1]

The weights stay as they are in the folder; every kind of cache is measured on the same windows against the float cache
of the same model. `LENGTH:WINDOWS`; lengths beyond the model's positions use rotary embeddings scaled by yarn, so that
their perplexity is of that changed model, float and packed alike. Divergence: the mean Kullback-Leibler divergence of
the packed predictions from the float ones; the rise of the loss has its standard error. `--decode`: milliseconds of
CPU time of a token after contexts of these lengths, the best of three times eight tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from torch import Tensor

from sparsebit.llm import cache_bytes, load, token_stream, windows
from sparsebit.llm.caching.cache_kinds import CACHE_KINDS, LARGEST
from sparsebit.llm.caching.cache_ranges import cache_ranges
from sparsebit.llm.caching.packed_cache import LayerCodes, drop_packed_cache, use_packed_cache
from sparsebit.llm.caching.row_codes import RowCodes
from sparsebit.llm.models.hub_classes import load_tokenizer

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

KINDS = ("float", "int8", "int8 layer", "fp8", "fp8 layer", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--lengths", nargs="*", default=["1024:12", "2048:4", "8192:1"])
    parser.add_argument("--decode", nargs="*", type=int, default=[])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    torch.set_grad_enabled(False)
    tokenizer = load_tokenizer(options.model)
    tokens = token_stream(options.heldout, tokenizer)
    positions = int(json.loads((options.model / "config.json").read_text())["max_position_embeddings"])
    with tempfile.TemporaryDirectory() as scratch:
        wanted = [tuple(map(int, entry.split(":"))) for entry in options.lengths]
        longest = max((length for length, *_ in [*wanted, *((length + 8,) for length in options.decode)]), default=0)
        native = load(options.model, device=options.device)
        scaled = (
            native
            if longest <= positions
            else load(_scaled(options.model, Path(scratch) / "model", longest, positions), device=options.device)
        )
        drawn = windows(token_stream(options.calibration, tokenizer), 512, 16)
        ranges = cache_ranges(native, drawn)
        for length, count in wanted:
            _show_quality(
                native if length <= positions else scaled, ranges, windows(tokens, length, count), options.kinds
            )
        for length in options.decode:
            model = native if length + 8 <= positions else scaled
            for kind in options.kinds:
                _show_decoding(model, ranges, kind, tokens[: length + 8][None])


def _scaled(source: Path, target: Path, length: int, positions: int) -> Path:
    """The folder with rotary embeddings for longer texts."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": length / positions, "original_max_position_embeddings": positions}
    config["rope_parameters"] = {**config["rope_parameters"], **rope}
    config["max_position_embeddings"] = length
    (target / "config.json").write_text(json.dumps(config))
    return target


def _use(model: Any, ranges: dict[int, tuple[Tensor, Tensor]], kind: str) -> None:
    drop_packed_cache(model)
    name, _, per = kind.partition(" ")
    known = next((known for known in CACHE_KINDS if known == name), None)
    if known is None:
        return

    def codes(largest: Tensor) -> RowCodes:
        if known == "int4":
            return RowCodes(known)
        return RowCodes(known, (largest.max()[None] if per else largest).reshape(-1, 1, 1) / LARGEST[known])

    use_packed_cache(model, {number: LayerCodes(codes(k), codes(v)) for number, (k, v) in ranges.items()})


def _show_quality(model: Any, ranges: dict[int, tuple[Tensor, Tensor]], drawn: Tensor, kinds: list[str]) -> None:
    """One row for each kind: float and packed logits of a window are compared at once."""
    losses: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    divergences: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    sizes: dict[str, int] = {}
    for window in drawn.to(model.device).split(1):
        expected = torch.empty(0)
        for kind in kinds:
            _use(model, ranges, kind)
            output = model(window, use_cache=True)
            sizes[kind] = cache_bytes(output.past_key_values)
            found = output.logits[0, :-1].float().log_softmax(-1)
            expected = found if kind == "float" else expected
            losses[kind].append(-found.gather(-1, window[0, 1:, None])[:, 0].double())
            divergences[kind].append(
                torch.cat(
                    [
                        (one.exp() * (one - other)).sum(-1)
                        for one, other in zip(expected.split(256), found.split(256), strict=True)
                    ]
                )
            )
    base = torch.cat(losses["float"])

    half = sizes["float"] * 2 / model.dtype.itemsize
    for kind in kinds:
        loss = torch.cat(losses[kind])
        rise, error = 100 * (loss - base).mean(), 100 * (loss - base).std() / math.sqrt(len(loss))
        print(
            f"{drawn.shape[1]:6} tokens x {len(drawn)}  {kind:11} perplexity {loss.mean().exp():9.4f}  "
            f"{rise:+.3f} % +- {error:.3f}  divergence {torch.cat(divergences[kind]).mean():.2e}  "
            f"{sizes[kind] / half:.3f} of the bytes in 16 bits",
            flush=True,
        )


def _show_decoding(model: Any, ranges: dict[int, tuple[Tensor, Tensor]], kind: str, tokens: Tensor) -> None:
    _use(model, ranges, kind)
    tokens = tokens.to(model.device)
    times: list[float] = []
    past = model(tokens[:, :-8], use_cache=True, logits_to_keep=1).past_key_values
    for _ in range(3):
        started = time.process_time() if model.device.type == "cpu" else time.perf_counter()
        for place in range(tokens.shape[1] - 8, tokens.shape[1]):
            model(tokens[:, place : place + 1], past_key_values=past, use_cache=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        ended = time.process_time() if model.device.type == "cpu" else time.perf_counter()
        times.append((ended - started) / 8)
        past.crop(-8)
    print(f"{tokens.shape[1] - 8:6} tokens  {kind:11} {1e3 * min(times):.2f} ms a token", flush=True)


if __name__ == "__main__":
    main()
