"""GGUF files in llama.cpp itself: the probabilities of the next token are those of our weights."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from sparsebit.llm import Recipe, convert, load, quantize
from tests.llm.models.test_sentencepiece_file import write_json, write_pieces
from tests.llm.tiny_models import LLAMA_3, QWEN, saved, tiny_model, wide_folder, with_bpe
from tests.parameters import listed

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("xllamacpp")

PROMPTS = [[1, 2, 3], [70, 9, 200, 31, 5, 5, 5, 88, 140, 17], list(range(60, 100))]
NUM_SHOWN = 8
LLAMA3 = {  # as Llama 3.1 has it, for a shorter text
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LETTER = 65
TOKENS = {"vocab_size": 264, "bos_token_id": 257, "eos_token_id": 258}

GEMMA3 = {"sliding_window_pattern": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}
GEMMA3_SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# As Phi-3 has it for long texts, and Phi-4-mini, which turns a part of each head.
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
}


def server_of(file: Path) -> Any:
    parameters = llama_cpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 128, 1, 1
    parameters.warmup = False
    return llama_cpp.Server(parameters)


def log_probabilities(file: Path, prompts: list[list[int]]) -> list[dict[int, float]]:
    """Of the likeliest next tokens behind each prompt, by token."""
    server = server_of(file)
    found = []
    for prompt in prompts:
        # What is sampled has to be a letter: no probabilities are told beside a part of one. The bias is not in them.
        request = {"prompt": prompt, "max_tokens": 1, "logprobs": NUM_SHOWN, "logit_bias": [[LETTER, 1000]]}
        answer = server.handle_completions({**request, "temperature": 0, "cache_prompt": False})
        (token,) = answer["choices"][0]["logprobs"]["content"]
        found.append({int(item["id"]): float(item["logprob"]) for item in token["top_logprobs"]})
    return found


def assert_probable(file: Path, model: Any, *, limit: float, prompts: list[list[int]] = PROMPTS) -> None:
    """llama.cpp rounds inputs of products to 8 bits: log probabilities differ by a few hundredths."""
    for prompt, found in zip(prompts, log_probabilities(file, prompts), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert len(found) == NUM_SHOWN
        differences = [abs(float(expected[token]) - value) for token, value in found.items()]
        assert max(differences) <= limit, (prompt, found, [float(expected[token]) for token in found])
        assert math.isclose(float(expected.max()), max(found.values()), abs_tol=limit)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model_type", "options", "changes"),
    [
        ("llama", {}, {}),
        ("llama", {"symmetric": False}, {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"bits": 8}, {"tie_word_embeddings": True}),
        ("llama", {"bits": 8}, {"rope_parameters": {**PLAIN, "rope_theta": 500.0}}),
        ("qwen2", {"bits": 3}, {}),
        ("mistral", {}, {"sliding_window": None, "head_dim": 32}),
        ("qwen3", {}, {}),
        ("qwen3", {"bits": 8}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"bits": 8}, {"rope_parameters": LLAMA3}),
        ("qwen3_moe", {}, {"mlp_only_layers": []}),
        ("gemma3_text", {"bits": 8}, {**GEMMA3, "rope_parameters": GEMMA3_SCALED}),
        ("gemma3_text", {}, GEMMA3),
        ("gemma3_text", {}, {**GEMMA3, "sliding_window": 128}),
        ("mixtral", {}, {"sliding_window": None}),
        ("mixtral", {"bits": 8}, {"sliding_window": 64, "head_dim": 32}),
        ("phi3", {}, {}),
        ("phi3", {"bits": 8}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "num_key_value_heads": 4}),
        ("phi", {}, {}),
        ("phi", {"bits": 8}, {"num_key_value_heads": 2}),
    ],
    ids=listed("""
        Q4_0 | Q5_0-biases | Q8_0-tied | base | qwen2 | mistral-wide-heads | qwen3 | linear | llama3 | experts |
        gemma3-linear | gemma3 | gemma3-wide-window | mixtral | mixtral-window | phi3 | phi3-part-of-heads | phi |
        phi-shared-keys
    """),
)
def test_llama_cpp_computes_the_packed_model(
    model_type: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(model_type, **TOKENS, **changes)
    folder = with_bpe(saved(model, tmp_path / "model"))
    recipe = Recipe(method="rtn", scale_search="none", **{"group_size": 32, "symmetric": True, **options})
    packed = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    made = convert(packed, tmp_path / "model.gguf", "gguf")
    assert made.check is not None and made.check.difference <= 1e-3
    assert_probable(made.output, load(packed), limit=0.1)


@pytest.mark.parametrize(
    ("original", "prompts"), [(256, PROMPTS), (16, PROMPTS[2:])], ids=["short-texts", "long-texts"]
)
def test_llama_cpp_has_the_frequencies_of_phi3(original: int, prompts: list[list[int]], tmp_path: Path) -> None:
    """Those of long texts where the context of llama.cpp is longer than `original`, where transformers' text is."""
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": original}
    model = tiny_model("phi3", **TOKENS, **lengths, rope_parameters=LONG)
    folder = with_bpe(saved(model, tmp_path / "model"))
    recipe = Recipe(method="rtn", scale_search="none", bits=8, group_size=32, symmetric=True)
    packed = quantize(folder, tmp_path / "packed", recipe, check=False).folder
    made = convert(packed, tmp_path / "model.gguf", "gguf")
    assert made.check is not None and made.check.difference <= 1e-3
    assert_probable(made.output, load(packed), limit=0.1, prompts=prompts)


def test_llama_cpp_computes_a_mix_of_types(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    made = convert(wide_folder(tmp_path), tmp_path / "mix.gguf", "gguf", gguf_type="Q4_K_M")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="mix.gguf", dtype=torch.float32)
    assert_probable(made.output, model.eval(), limit=0.1)


TEXTS = ("ab cab  abba\n\n x", "ünïcödé — 12.5%", " \t", "日本 🙂", "a\u00a0b", "It's 12345'LL", "ÉCole हिन्दी", "hello")


@pytest.mark.parametrize(
    ("pattern", "ignores_merges"),
    [("", False), (LLAMA_3, True), (LLAMA_3, False), (QWEN, False)],
    ids=["gpt-2", "llama-bpe", "dbrx", "qwen2"],
)
def test_llama_cpp_splits_text_as_the_tokenizer(pattern: str, ignores_merges: bool, tmp_path: Path) -> None:
    """All neighbours are merged that are not split; "hello" is a token that no merges lead to."""
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    steps = [pre.Split(tokenizers.Regex(pattern), "isolated")] if pattern else []
    joined = [
        "".join(part for part, _ in pre.ByteLevel(False, use_regex=False).pre_tokenize_str(text)) for text in TEXTS
    ]
    merges = sorted({(a, b) for text in joined for a, b in itertools.pairwise(text)})
    parts = [*sorted(pre.ByteLevel.alphabet()), *(a + b for a, b in merges), "hello"]
    vocab = {text: number for number, text in enumerate(parts)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = pre.Sequence([*steps, pre.ByteLevel(False, use_regex=not pattern)])
    folder = saved(
        tiny_model(**{**TOKENS, "vocab_size": len(vocab)}), tmp_path / "phi3"
    )  # not one in spite of its name
    tokenizer.save(str(folder / "tokenizer.json"))
    server = server_of(convert(folder, tmp_path / "m.gguf", "gguf", gguf_type="Q4_K", check=False).output)
    for text in TEXTS:
        assert split(server, text) == tokenizer.encode(text).ids


def test_llama_cpp_removes_spaces_behind_tokens_of_phi3(tmp_path: Path) -> None:
    folder = write_json(write_pieces(saved(tiny_model(vocab_size=288), tmp_path / "model")))
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    for entry in found["added_tokens"]:
        entry["rstrip"] = entry["content"] in ("</s>", "<|user|>")
    found["added_tokens"].append({**found["added_tokens"][1], "content": "<|endoftext|>", "id": 287})
    file.write_text(json.dumps(found))
    server = server_of(convert(folder, tmp_path / "m.gguf", "gguf", gguf_type="Q4_K", check=False).output)
    assert split(server, "<|user|>\nhello</s>\n") == split(server, "<|user|>hello</s>")
    newline = 3 + 10
    assert newline in split(server, "<|endoftext|>\n") and newline not in split(server, "<|user|>\n")


def split(server: Any, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False}).encode()
    request = Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return [int(token) for token in json.load(answer)["tokens"]]
