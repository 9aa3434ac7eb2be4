"""One QLoRA step on packed weights beside bf16 LoRA and, where bitsandbytes is installed, NF4: time and peak memory.

`python benchmarks/llm_finetune.py --device cuda` measures a random model of the shape of Llama 3.2 1B; `--shape tiny`
runs anywhere, on a CPU too. A step is forward and backward of `--rows` rows of `--length` tokens, with gradient
checkpointing, and AdamW of the adapters. Each way gets a new process, so that peak memory is its own. The peers
compute their loss as transformers does, from all logits; `lora_blocks` is LoRA in bf16 with the loss of
`sparsebit.llm`, which holds few logits at a time, and `lora_recorded` also has its blocks recorded as CUDA graphs, as
`packed` has: against that only the packed weights make the difference. `packed_calls` is without the recordings.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit
from torch import nn

from sparsebit.llm.finetuning.data.sample_packing import Batch
from sparsebit.llm.finetuning.data.token_loss import summed_loss_in_blocks
from sparsebit.llm.finetuning.layers.packed_lora import add_adapter
from sparsebit.llm.finetuning.layers.recorded_blocks import record_blocks
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.quant_linear import QuantLinear, kernel_paths, resident_bytes
from sparsebit.numerics.packing import num_words

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}
WAYS = ("packed", "packed_calls", "lora", "lora_blocks", "lora_recorded", "nf4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=[2, 3, 4, 8])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--output", type=Path, help="a file that gets the JSON lines too")
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)  # what a process of its own measures
    options = parser.parse_args()
    if options.one:
        torchvision_shim.install()  # transformers imports torchvision where it is installed
        print(json.dumps(measure(options.one, options)))
        return
    found: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        if way == "nf4" and (find_spec("bitsandbytes") is None or not options.device.startswith("cuda")):
            print("nf4: bitsandbytes is not installed, or there is no GPU; left out", file=sys.stderr)
            continue
        for bits in options.bits if way.startswith("packed") else options.bits[:1]:
            name = way.replace("packed", f"packed_{bits}bit")
            found[name] = in_a_process(way, bits)
    for name, record in found.items():
        ratios = {
            f"against_{peer}": {
                "time": record["seconds"] / found[peer]["seconds"],
                "memory": record["peak_bytes"] / found[peer]["peak_bytes"],
            }
            for peer in ("lora", "lora_blocks", "lora_recorded", "nf4")
            if peer in found and peer != name
        }
        setting = {key: getattr(options, key) for key in ("shape", "device", "rows", "length", "rank", "group_size")}
        emit({"benchmark": "llm_finetune", "way": name, **setting, **record, **ratios}, options.output)


def in_a_process(way: str, bits: int) -> dict[str, Any]:
    given = [argument for argument in sys.argv[1:] if argument != "--one"]
    done = subprocess.run(
        [sys.executable, __file__, *given, "--one", way, "--bits", str(bits)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{way}: {done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(way, options, device, dtype)
    settings = {"use_reentrant": False, "preserve_rng_state": way in ("lora", "nf4")}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    shape = options.rows, options.length
    recorder = record_blocks(model, shape, device) if way in ("packed", "lora_recorded") else None
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    tokens = torch.randint(0, SHAPES[options.shape]["vocab_size"], (options.rows, options.length), device=device)
    loss_of = of_transformers if way in ("lora", "nf4") else in_blocks

    def step() -> float:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    first = step()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.steps):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(times),
        "peak_bytes": peak_bytes(device) + (recorder.num_bytes if recorder else 0),
        "replays": recorder.num_replays if recorder else 0,
        "resident_bytes": resident_bytes(model),
        "trained_parameters": sum(parameter.numel() for parameter in parameters),
        "first_loss": first,
        "packed_layers": kernel_paths(model),
    }


def make_model(way: str, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    import transformers

    limit = max(2048, options.length)
    config = transformers.AutoConfig.for_model("llama", **SHAPES[options.shape], max_position_embeddings=limit)
    if way == "nf4":
        return nf4_model(config, options, device)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if way.startswith("packed"):
        for name, part in list(model.named_modules()):
            if type(part) is nn.Linear and ".layers." in name:
                packed = random_packed(part, options.bits[0], options.group_size, device)
                layer = QuantLinear(packed)
                layer.prepare(dtype)
                model.set_submodule(name, layer)
    fill(model, device)
    wrapped = add_adapter(model, rank=options.rank)
    if not way.startswith("packed"):  # peft casts bf16 adapters to float32, which multiply slowly on a GPU
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    return wrapped.get_base_model()


def fill(model: Any, device: torch.device) -> None:
    """Random values for what is on the meta device, and the rotary frequencies as the model computes them."""
    from sparsebit.llm.models.skeleton import restore_buffers, set_tensor

    for part in model.modules():
        restore_buffers(model, part, device)
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                value.fill_(1.0) if value.ndim == 1 else value.normal_(std=0.02)
                set_tensor(part, name, value)
    model.tie_weights()
    model.requires_grad_(False)


def random_packed(layer: nn.Linear, bits: int, group_size: int, device: torch.device) -> PackedWeight:
    """Random codes, with scales that give weights of a usual size."""
    out_features, in_features = layer.weight.shape
    words = torch.randint(-(2**31), 2**31 - 1, (out_features, num_words(in_features, bits)), device=device)
    scales = torch.full((out_features, in_features // group_size), 0.07 / (1 << bits), device=device)
    zeros = torch.full(scales.shape, 1 << bits - 1, dtype=torch.uint8, device=device)
    stored = torch.bfloat16 if device.type == "cuda" else torch.float32
    return PackedWeight(words.to(torch.int32), scales.to(stored), zeros, bits, group_size, in_features)


def nf4_model(config: Any, options: argparse.Namespace, device: torch.device) -> Any:
    """The usual QLoRA: layers of bitsandbytes with double quantization, adapters of peft."""
    import bitsandbytes as bnb
    import peft
    import transformers

    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and ".layers." in name:
            layer = bnb.nn.Linear4bit(
                part.in_features,
                part.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
            layer.weight = bnb.nn.Params4bit(part.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            model.set_submodule(name, layer.to(device))
    model.requires_grad_(False)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=options.rank, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    torch.cuda.empty_cache()
    return wrapped.get_base_model()


def of_transformers(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def in_blocks(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return summed_loss_in_blocks(model, Batch(tokens, positions, targets)) / targets[:, :-1].numel()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
