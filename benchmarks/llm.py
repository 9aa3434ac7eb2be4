"""Perplexity of book-llama, quantized by `sparsebit.llm` and measured packed, with the CPU time it takes.

`python benchmarks/llm.py --formats 4g128 3g128 2g64`; `--mixed 3.0` adds mixed bits of that average, `--decode` the
speed of generation from the first model, `--rotate` each recipe again with rotated hidden states. `--end-to-end 500`
trains all blocks together at the end; `--record FILE` appends a line of JSON for each row. `--peers torchao` measures
that package's weights of the same formats, rounded to nearest without text, in the same run. `SPARSEBIT_DATA` names the
data folder. Calibration text is from the training set; the figure is of the first 60 windows of 512 tokens of the
held-out books.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import ROOT, data_folder, emit
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsebit.llm import (
    Calibration,
    QuantizedModel,
    Recipe,
    calibration_tokens,
    kernel_paths,
    load,
    perplexity,
    quantize,
    resident_bytes,
    token_stream,
    windows,
)

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim


def main() -> None:
    options = given()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    from transformers import AutoTokenizer

    torch.set_num_threads(options.threads)
    data = data_folder()
    source = data / "book_llama"
    heldout = windows(
        token_stream(data / "text" / "books_heldout.txt", AutoTokenizer.from_pretrained(source)),
        512,
        options.num_windows,
    )
    calibration = Calibration(data / "text" / "books_calibration.txt", num_samples=options.num_samples)
    model = load(source, device=options.device)
    floats, size = perplexity(model, heldout).value, resident_bytes(model)
    print(f"float: perplexity {floats:.2f}, {size / 1e6:.1f} MB in memory")
    pythons = dict(one.split("=", 1) for one in options.peer_python)
    for peer in options.peers:
        for name in options.formats:
            print_peer(
                peer, name, pythons.get(peer, sys.executable), source, calibration, heldout, floats, options.steps
            )
    for number, recipe in enumerate(recipes_of(options)):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            how = {"device": options.device, "check": not options.no_check}
            made = quantize(source, Path(folder) / "packed", recipe, calibration, **how)
            seconds = time.process_time() - started
            packed = load(made.folder, device=options.device)
            found = perplexity(packed, heldout).value
            if options.decode and number == 0:
                print_decoding(model, made.folder)
        bits = f"mixed {recipe.average_bits:g}" if recipe.is_mixed else f"W{recipe.bits}"
        bits += " symmetric" if recipe.symmetric else ""
        print(
            f"{bits} g{recipe.group_size} {recipe.method}{' rotated' if recipe.rotate else ''}: perplexity {found:.2f} "
            f"({100 * (found / floats - 1):+.2f} %), {seconds:.0f} CPU s, {made.seconds:.0f} s, "
            f"{resident_bytes(packed) / 1e6:.1f} MB in memory{_trained(made)}",
            flush=True,
        )
        if options.record:
            record = {"recipe": {key: value for key, value in asdict(recipe).items() if value is not None}}
            trained = None if made.end_to_end is None else asdict(made.end_to_end)
            record |= {"float": floats, "perplexity": found, "bits_per_weight": made.bits_per_weight}
            record |= {"end_to_end": trained, "cpu_seconds": round(seconds), "seconds": round(made.seconds)}
            emit({"benchmark": "llm", **record, "threads": options.threads, "device": options.device}, options.record)


def given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["4g128", "3g128", "2g64"], help="BITSgGROUP, e.g. 4g128")
    parser.add_argument("--methods", nargs="*", default=["rtn", "gptq"], help="those of Recipe")
    parser.add_argument(
        "--mixed", nargs="*", type=float, default=[], help="average bits of 2, 3 and 4, in groups of 128"
    )
    parser.add_argument("--steps", type=int, default=200, help="of autoround and auto-round, for each block")
    parser.add_argument("--end-to-end", type=int, default=0, help="steps of training all blocks together")
    parser.add_argument("--mixed-group", type=int, default=128, help="the group size of mixed bits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-check", action="store_true", help="where compressed-tensors is not installed")
    parser.add_argument("--record", type=Path, help="a file of JSON lines")
    parser.add_argument("--rotate", action="store_true", help="also: each recipe with rotated hidden states")
    parser.add_argument("--decode", action="store_true", help="also: tokens per CPU second, of the first format")
    parser.add_argument("--peers", nargs="*", default=[], help="torchao, llm-compressor, auto-round")
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PEER=PYTHON", help="this one")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--num-windows", type=int, default=60)
    return parser.parse_args()


def recipes_of(options: argparse.Namespace) -> list[Recipe]:
    recipes = [
        Recipe(
            method,
            *map(int, name.removesuffix("s").split("g")),
            symmetric=name.endswith("s"),
            **({"steps": options.steps} if method in ("autoround", "efficientqat") else {}),
        )
        for name in options.formats
        for method in options.methods
    ]
    recipes += [
        Recipe(group_size=options.mixed_group, candidate_bits=(2, 3, 4), average_bits=average)
        for average in options.mixed
    ]
    recipes = [replace(recipe, end_to_end=options.end_to_end) for recipe in recipes]
    if options.rotate:
        recipes = [one for recipe in recipes for one in (recipe, replace(recipe, rotate=True))]
    return recipes


def _trained(made: QuantizedModel) -> str:
    found = made.end_to_end
    if found is None:
        return ""
    return f"; end to end {found.before:.4f} to {found.after:.4f} nats, best after {found.kept_step} steps"


def print_peer(
    peer: str,
    name: str,
    python: str,
    source: Path,
    calibration: Calibration,
    heldout: Tensor,
    floats: float,
    steps: int,
) -> None:
    """One line of a package's weights in a format. The linear layers of the float model get them, dequantized."""
    from transformers import AutoTokenizer

    tokens = calibration_tokens(
        Path(calibration.text),
        AutoTokenizer.from_pretrained(source),
        num_samples=calibration.num_samples,
        length=calibration.length,
        seed=calibration.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "tokens.safetensors", Path(folder) / "weights.safetensors"
        save_file({"tokens": tokens.contiguous()}, given)
        script = Path(__file__).with_name("llm_peers.py")
        command = [python, str(script), peer, name, "--model", str(source), "--tokens", str(given)]
        # Their environment has its own packages: ours must not come in front of them.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [*command, "--output", str(made), "--steps", str(steps)], env=environment, capture_output=True, check=False
        )
        if done.returncode:
            print(f"{name} {peer}: failed, {done.stderr.decode(errors='replace')[-400:]}", flush=True)
            return
        model = load(source)
        with safe_open(made, "pt") as file, torch.no_grad():
            notes = file.metadata()
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                model.get_parameter(key).copy_(file.get_tensor(key))
    found = perplexity(model, heldout).value
    change = 100 * (found / floats - 1)
    what = f"{name} {peer} {notes['version']}" + (f", {steps} steps" if peer == "auto-round" else "")
    print(f"{what}: perplexity {found:.2f} ({change:+.2f} %), {notes['cpu_seconds']} CPU s", flush=True)


def print_decoding(model: Any, folder: Path) -> None:
    """Tokens per CPU second of the float model and of each way to run the packed one; the best of twelve turns."""
    models = {"float": model}
    models |= {name: load(folder, activations=name) for name in ("float32", "bfloat16", "int8")}
    models["bfloat16, joined"] = load(folder, activations="bfloat16", join_layers=True)
    best = dict.fromkeys(models, 0.0)
    prompt = torch.arange(5, 9)[None]
    for _ in range(12):
        for name, one in models.items():
            started = time.process_time()
            one.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=False,
                pad_token_id=0,
            )
            best[name] = max(best[name], 24 / (time.process_time() - started))
    for name, one in models.items():
        size = resident_bytes(one) / 1e6
        print(f"decode {name}: {best[name]:.1f} tokens per CPU s, {size:.1f} MB, {kernel_paths(one)}", flush=True)


if __name__ == "__main__":
    main()
