"""Small random language models of each architecture, saved as transformers saves them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.execution.run_folder import RunFolder

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# What a type wants beside the sizes.
EXTRAS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "phi": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 16},
}
_COMPUTED = {"falcon": ("head_dim",)}  # sizes that a config of the type computes itself

# Patterns by which tokenizers split text.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")


def tiny_model(model_type: str = "llama", **changes: Any) -> Any:
    """A random model of the type, with weights of one size, in float32."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    wanted = {**SIZES, **EXTRAS.get(model_type, {}), **changes}
    wanted = {name: value for name, value in wanted.items() if name not in _COMPUTED.get(model_type, ())}
    config = transformers.AutoConfig.for_model(model_type, **wanted)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return model


@contextlib.contextmanager
def stopped_after(num_blocks: int = 1) -> Iterator[None]:
    """A run inside is interrupted as soon as so many blocks are kept."""
    write, count = RunFolder.write, itertools.count(1)

    def writing(*args: Any) -> None:
        write(*args)
        if next(count) == num_blocks:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "write", writing)
        with pytest.raises(KeyboardInterrupt):
            yield


def saved(model: Any, folder: Path, *, dtype: torch.dtype = torch.float16) -> Path:
    """The model in a folder, in several files."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder


def loaded(folder: Path) -> Any:
    """The model as transformers loads it, in float32."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_tokenizer(folder: Path) -> Path:
    """A tokenizer of 96 letters beside the model, with a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"<unk>": 95}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="~")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def with_bpe(folder: Path) -> Path:
    """A byte-level tokenizer of 259 tokens beside the model."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)} | {"ab": 256}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.save(str(folder / "tokenizer.json"))
    return folder


def wide_folder(tmp_path: Path, **more: Any) -> Path:
    """A float model with rows of 256 and 384 weights: 384 is not a whole number of blocks."""
    model = tiny_model(
        vocab_size=264, bos_token_id=257, eos_token_id=258, hidden_size=256, intermediate_size=384, head_dim=64, **more
    )
    return with_bpe(saved(model, tmp_path / "model", dtype=torch.float16))


def write_text(path: Path, num_letters: int = 4000) -> Path:
    """Random letters."""
    numbers = torch.randint(33, 126, (num_letters,), generator=torch.Generator().manual_seed(5)).tolist()
    path.write_text("".join(map(chr, numbers)), encoding="utf-8")
    return path
