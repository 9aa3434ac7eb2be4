"""GGUF files: blocks that the package gguf reads as our values, and models that transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sparsebit.errors import ConfigError, DeploymentError, MissingExtraError
from sparsebit.llm import Recipe, convert, quantize
from sparsebit.llm.converting import load_check
from sparsebit.llm.gguf import architectures as gguf_architectures
from sparsebit.llm.gguf.blocks import block_type, blocks_of, why_not
from sparsebit.llm.gguf.tensors import GgufTensor, with_stacked_experts
from sparsebit.llm.gguf.tokenizer import _pre, name_in_file
from sparsebit.llm.layers.packed_weight import PackedWeight
from tests.llm.layers.test_packed_weight import packed_weight
from tests.llm.tiny_models import LLAMA_3, QWEN, saved, tiny_model, wide_folder, with_bpe
from tests.parameters import listed

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(("bits", "symmetric", "kind"), [
    (4, True, "Q4_0"), (4, False, "Q5_0"), (3, True, "Q4_0"), (3, False, "Q4_0"), (2, False, "Q4_0"), (8, True, "Q8_0"),
], ids=["4", "4-zero-points", "3", "3-zero-points", "2-zero-points", "8"])  # fmt: skip
@pytest.mark.parametrize("group_size", [32, 96])
def test_their_reader_gives_our_values(bits: int, symmetric: bool, kind: str, group_size: int) -> None:
    packed = packed_weight(bits, symmetric, group_size)
    assert block_type(bits, symmetric) == kind and why_not(packed) is None
    found = gguf.quants.dequantize(blocks_of(packed).numpy(), gguf.GGMLQuantizationType[kind])
    expected = packed.dequantize(torch.float32)
    assert torch.equal(torch.from_numpy(found), expected)


def test_what_blocks_cannot_hold() -> None:
    codes = torch.zeros(4, 48, dtype=torch.uint8)
    assert "groups of 16" in str(why_not(PackedWeight.from_codes(codes, torch.ones(4, 3), None, 4)))
    assert "8 bits with zero points" in str(why_not(packed_weight(8)))
    assert "float16" in str(why_not(PackedWeight.from_codes(codes[:, :32], torch.full((4, 1), 1e-9), None, 4)))


def packed_folder(tmp_path: Path, model_type: str = "llama", *, window: int | None = None, **options: Any) -> Path:
    more = {"sliding_window": window} if model_type in ("mistral", "mixtral", "phi3") else {}
    model = tiny_model(model_type, vocab_size=264, bos_token_id=257, eos_token_id=258, **more)
    folder = with_bpe(saved(model, tmp_path / "model", dtype=options.pop("dtype", torch.float16)))
    recipe = Recipe(method="rtn", scale_search="none", **{"group_size": 32, "symmetric": True, **options})
    return quantize(folder, tmp_path / "packed", recipe, check=False).folder


@pytest.mark.parametrize(("model_type", "options"), [
    ("llama", {}), ("llama", {"symmetric": False, "group_size": 64}), ("llama", {"bits": 8, "dtype": torch.bfloat16}),
    ("qwen2", {"bits": 3, "group_size": 0}), ("mistral", {}), ("qwen3", {}), ("phi3", {}),
], ids=["Q4_0", "Q5_0", "Q8_0-bfloat16", "qwen2", "mistral", "qwen3", "phi3"])  # fmt: skip
@pytest.mark.sample(3)
def test_transformers_loads_it(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = packed_folder(tmp_path, model_type, **options)
    made = convert(source, tmp_path / "model.gguf", "gguf")
    assert made.check is not None and made.check.difference <= 1e-3
    assert made.check.reader == ("transformers (with head_dim=16)" if model_type == "qwen3" else "transformers")
    reader = gguf.GGUFReader(made.output)
    assert reader.fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert reader.fields["tokenizer.ggml.tokens"].contents()[256:259] == ["ab", "<s>", "</s>"]
    assert {tensor.name for tensor in reader.tensors} >= {"token_embd.weight", "blk.2.ffn_down.weight"}


def test_biases_of_a_llama(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(vocab_size=264, bos_token_id=257, eos_token_id=258, attention_bias=True, mlp_bias=True)
    folder = with_bpe(saved(model, tmp_path / "model"))
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)
    made = convert(quantize(folder, tmp_path / "packed", recipe, check=False).folder, tmp_path / "m.gguf", "gguf")
    assert made.check is not None and made.check.difference <= 1e-3
    assert made.check.reader == "transformers (with attention_bias=True, mlp_bias=True)"
    assert "only where from_pretrained is given attention_bias=True, mlp_bias=True" in caplog.text
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(made.output).tensors}
    assert torch.equal(found["blk.1.attn_v.bias"], model.model.layers[1].self_attn.v_proj.bias.half().float())
    halves = model.model.layers[1].self_attn.q_proj.bias.half().float().view(4, 2, 8)
    assert torch.equal(found["blk.1.attn_q.bias"].view(4, 8, 2), halves.transpose(1, 2))  # pairs, as its weight has
    assert {f"blk.0.{name}.bias" for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")} <= found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True], ids=["own-output", "tied"])
def test_a_float_model_as_a_mix(is_tied: bool, tmp_path: Path) -> None:
    made = convert(wide_folder(tmp_path, tie_word_embeddings=is_tied), tmp_path / "m.gguf", "gguf", gguf_type="Q4_K_M")
    assert made.check is not None and made.check.difference <= 1e-3 and not made.formats
    assert made.check.weight_error is not None and 0.02 < made.check.weight_error < 0.09
    assert made.check.from_source is not None and made.check.from_source > 0.01
    types = made.gguf_types
    assert types["token_embd.weight"] == ("Q6_K" if is_tied else "Q4_K")
    assert types.get("output.weight", "Q6_K") == "Q6_K"
    assert types["blk.0.attn_q.weight"] == "Q4_K" and types["blk.2.attn_v.weight"] == "Q6_K"
    assert types["blk.0.ffn_down.weight"] == "Q5_0" and types["blk.2.ffn_down.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"
    reader = gguf.GGUFReader(made.output)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == types
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(method="rtn", scale_search="none", group_size=32), 0.02),
        (Recipe(method="rtn", scale_search="none", bits=8, group_size=128), 0.09),
        (Recipe(method="mxfp4"), 0.2),
    ],
    ids=["4-zero-points", "8-zero-points", "mxfp4"],
)
def test_a_packed_model_as_q4_k(recipe: Recipe, expected: float, tmp_path: Path) -> None:
    packed = quantize(wide_folder(tmp_path), tmp_path / "packed", recipe, check=False).folder
    made = convert(packed, tmp_path / "m.gguf", "gguf", gguf_type="Q4_K")
    assert made.check is not None and made.check.difference <= 1e-3
    assert made.check.weight_error is not None and made.check.weight_error < expected
    assert made.gguf_types["blk.0.attn_q.weight"] == "Q4_K" and made.gguf_types["token_embd.weight"] == "F16"


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MOE = {"mlp_only_layers": [], "moe_intermediate_size": 384, "hidden_size": 256, "head_dim": 64}


def expert_folder(tmp_path: Path, **changes: Any) -> Path:
    model = tiny_model("qwen3_moe", vocab_size=264, bos_token_id=257, eos_token_id=258, **{**MOE, **changes})
    return with_bpe(saved(model, tmp_path / "model"))


@pytest.mark.slow
def test_experts_become_one_tensor_and_their_router_stays(tmp_path: Path) -> None:
    made = convert(expert_folder(tmp_path), tmp_path / "m.gguf", "gguf", gguf_type="Q4_K_M")
    assert made.check is not None and made.check.difference <= 1e-3
    assert made.check.weight_error is not None and 0.02 < made.check.weight_error < 0.09
    types = made.gguf_types
    assert types["blk.0.ffn_gate_exps.weight"] == "Q4_K" and types["blk.2.ffn_down_exps.weight"] == "Q8_0"
    assert types["blk.0.ffn_gate_inp.weight"] == "F16"
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(made.output).tensors}
    assert shapes["blk.0.ffn_gate_exps.weight"] == [256, 384, 4]


def float_folder(tmp_path: Path, model_type: str, **changes: Any) -> Path:
    """A float model with rows of 256 and 384 weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    model = tiny_model(model_type, vocab_size=264, bos_token_id=257, eos_token_id=258, **{**sizes, **changes})
    return with_bpe(saved(model, tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "types"),
    [
        ("mixtral", {"0.ffn_gate_exps": "Q4_K", "2.ffn_down_exps": "Q8_0", "0.ffn_gate_inp": "F16"}),
        ("phi", {"0.ffn_up": "Q4_K", "2.attn_v": "Q6_K", "2.ffn_down": "Q8_0"}),
    ],
    ids=["mixtral", "phi"],
)
def test_what_transformers_does_not_read_is_read_by_the_package(
    model_type: str, types: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = convert(float_folder(tmp_path, model_type), tmp_path / "m.gguf", "gguf", gguf_type="Q4_K_M")
    assert made.check is not None and made.check.difference <= 1e-6
    assert made.check.reader.startswith(f"gguf (transformers does not read {model_type} models")
    assert f"m.gguf: llama.cpp reads {model_type}, transformers does not" in caplog.text
    assert made.check.weight_error is not None and 0.02 < made.check.weight_error < 0.09
    assert {name: made.gguf_types[f"blk.{name}.weight"] for name in types} == types


def test_a_file_without_a_tensor_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_check.all_values

    def without_a_bias(path: Path, tensors: list[GgufTensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in found(path, tensors).items() if name != "lm_head.bias"}

    monkeypatch.setattr(load_check, "all_values", without_a_bias)
    with pytest.raises(DeploymentError, match=r"m\.gguf has no weights for lm_head\.bias; it is not kept"):
        convert(float_folder(tmp_path, "phi"), tmp_path / "m.gguf", "gguf", gguf_type="Q4_K")
    assert not (tmp_path / "m.gguf").exists()


def test_a_matrix_of_q_k_and_v_has_more_bits_where_v_has(tmp_path: Path) -> None:
    made = convert(float_folder(tmp_path, "phi3"), tmp_path / "m.gguf", "gguf", gguf_type="Q4_K_M")
    assert made.check is not None and made.check.difference <= 1e-3
    types = made.gguf_types
    assert types["blk.0.attn_qkv.weight"] == "Q4_K" and types["blk.2.attn_qkv.weight"] == "Q6_K"
    assert types["blk.0.ffn_up.weight"] == "Q4_K"


def test_experts_that_one_tensor_cannot_hold() -> None:
    """Mixed bits may give experts of a block different ones."""
    experts = [
        GgufTensor("blk.0.ffn_up_exps.weight", kind, (4, 18), (f"mlp.experts.{number}.up",), None, False, torch.Tensor)
        for number, kind in ((10, "Q8_0"), (9, "Q4_0"))
    ]
    with pytest.raises(DeploymentError, match=r"ffn_up_exps.weight holds all experts in one type.*Q4_0, Q8_0"):
        with_stacked_experts(experts)
    alike = [replace(expert, kind="Q4_0", data=partial(torch.full, (4, 18), i)) for i, expert in enumerate(experts)]
    (stacked,) = with_stacked_experts(alike)
    assert stacked.parameters == ("mlp.experts.9.up", "mlp.experts.10.up") and stacked.shape == (2, 4, 18)
    assert stacked.read()[:, 0, 0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "activation 'relu': llama.cpp computes models of llama with 'silu' alone"),
        ("qwen3", {"attention_bias": True}, "attention_bias True: llama.cpp computes models of qwen3 with False alone"),
        ("gemma3_text", {"query_pre_attn_scalar": 32}, "query_pre_attn_scalar 32: .* with 16 alone"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0: .* with None alone"),
        ("gemma3_text", {"sliding_window_pattern": 2}, "each 6th layer attends to the whole text"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True: .* with False alone"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False: .* with True alone"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]: .* with \[\] alone"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2: .* with 1 alone"),
        ("qwen2", {"head_dim": 32}, "head_dim 32: llama.cpp computes models of qwen2 with 16 alone"),
        ("phi3", {"head_dim": 32}, "head_dim 32: llama.cpp computes models of phi3 with 16 alone"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True: .* with False alone"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings True: .* with False alone"),
        ("mixtral", {"rope_parameters": HALF}, "partial_rotary_factor.* only types default, linear, llama3, of whole"),
    ],
    ids=listed("""
        activation | biases | scale | softcap | window | both-ways | experts-sum | some-experts | experts-in-turn |
        qwen2-heads | phi3-heads | phi-norms | phi-tied | half-heads
    """),
)
def test_what_llama_cpp_computes_in_one_way_alone(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    usual: dict[str, dict[str, Any]] = {
        "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
        "qwen3_moe": {"mlp_only_layers": []},
    }
    settings = {**usual.get(model_type, {}), **changes}
    model = tiny_model(model_type, vocab_size=264, bos_token_id=257, eos_token_id=258, **settings)
    with pytest.raises(DeploymentError, match=message):
        convert(with_bpe(saved(model, tmp_path / "model")), tmp_path / "m.gguf", "gguf", gguf_type="Q4_K")


def test_types_are_for_gguf_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gguf_type='Q4_K' with format='gptq'"):
        convert(tmp_path, tmp_path / "x", "gptq", gguf_type="Q4_K")


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3"])
def test_a_window_of_attention_is_the_length_of_texts(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = convert(packed_folder(tmp_path, model_type, window=8), tmp_path / "a.gguf", "gguf")
    assert made.check is not None and made.check.difference <= 1e-3
    fields = gguf.GGUFReader(made.output).fields
    (length,) = [field.contents() for name, field in fields.items() if name.endswith(".context_length")]
    assert length == 8 and not any("sliding_window" in name for name in fields)
    assert "(sliding_window: 8)" in caplog.text and "the file is for texts of up to 8 tokens" in caplog.text


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_rotary_embeddings_as_older_configs_name_them(tmp_path: Path, kind: str) -> None:
    folder = packed_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": kind, "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DeploymentError, match=f"rotary embeddings .*{kind}"):
        convert(folder, tmp_path / "a.gguf", "gguf", check=False)


def test_tensors_without_a_place_are_left_out(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path)
    (folder / "checksums.json").unlink()
    name, index = "model.layers.0.self_attn.rotary_emb.inv_freq", folder / "model.safetensors.index.json"
    save_file({name: torch.ones(8)}, folder / "more.safetensors")
    entries = json.loads(index.read_text())
    entries["weight_map"][name] = "more.safetensors"
    index.write_text(json.dumps(entries))
    assert convert(folder, tmp_path / "a.gguf", "gguf").check is not None


@pytest.mark.parametrize("adds", [False, True], ids=["nothing", "both"])
def test_a_server_gets_what_a_text_begins_and_ends_with_and_the_chat_template(tmp_path: Path, adds: bool) -> None:
    folder = packed_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    if adds:
        found = json.loads((folder / "tokenizer.json").read_text())
        ends = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<s>", "</s>")]
        found["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [ends[0], {"Sequence": {"id": "A", "type_id": 0}}, ends[1]],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [n], "tokens": [t]} for t, n in (("<s>", 257), ("</s>", 258))},
        }
        (folder / "tokenizer.json").write_text(json.dumps(found))
    fields = gguf.GGUFReader(convert(folder, tmp_path / "a.gguf", "gguf").output).fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0]['content'] }}"
    assert fields["tokenizer.ggml.add_bos_token"].contents() == adds
    assert fields["tokenizer.ggml.add_eos_token"].contents() == adds


WORDS, BYTES = {"type": "ByteLevel", "use_regex": True}, {"type": "ByteLevel", "use_regex": False}


def by_pattern(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **more}


DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(("steps", "ignores_merges", "expected"), [
    ([WORDS], False, "gpt-2"), ([DIGITS, WORDS], False, "smollm"), ([by_pattern(LLAMA_3), BYTES], True, "llama-bpe"),
    ([by_pattern(LLAMA_3), BYTES], False, "dbrx"),
    ([by_pattern(LLAMA_3, behavior="Removed", invert=True), BYTES], False, "dbrx"),
    ([by_pattern(QWEN), BYTES], False, "qwen2"), ([by_pattern(r"\p{Lu}+|\p{N}{1,3}"), BYTES], False, None),
    ([by_pattern(LLAMA_3), WORDS], False, None), ([by_pattern(LLAMA_3, behavior="Removed"), BYTES], False, None),
    ([by_pattern(LLAMA_3, behavior="MergedWithNext"), BYTES], False, None), ([by_pattern(QWEN), BYTES], True, None),
    ([WORDS], True, None), ([DIGITS, WORDS], True, None), ([{"type": "Punctuation"}, WORDS], False, None),
    ([{**WORDS, "add_prefix_space": True}], False, None), ([BYTES], False, None),
])  # fmt: skip
def test_how_text_is_split(steps: list[dict[str, Any]], ignores_merges: bool, expected: str | None) -> None:
    if expected is not None:
        assert _pre(steps, Path("tokenizer.json"), ignores_merges=ignores_merges) == expected
        return
    with pytest.raises(DeploymentError, match="no name for"):
        _pre(steps, Path("tokenizer.json"), ignores_merges=ignores_merges)


def test_merges_that_llama_cpp_does_not_do_are_refused(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path)
    found = json.loads((folder / "tokenizer.json").read_text())
    found["model"]["end_of_word_suffix"] = "</w>"
    (folder / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(DeploymentError, match="merges with end_of_word_suffix"):
        convert(folder, tmp_path / "a.gguf", "gguf", check=False)


PHI3_TOKENS = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>")
BEHIND = {"</s>": {"rstrip": True}, "<|user|>": {"rstrip": True}}


@pytest.mark.parametrize(
    ("name", "tokens", "flags", "expected", "is_told"),
    [
        ("w4", PHI3_TOKENS, BEHIND, "phi-3 w4", False),
        ("my-Phi-3-w4", PHI3_TOKENS, BEHIND, "my-Phi-3-w4", False),
        ("my-Phi-3-w4", PHI3_TOKENS, {}, "my-Phi 3-w4", False),
        ("phi3", PHI3_TOKENS[:3], {"</s>": {"rstrip": True}}, "phi 3", True),
        ("w4", PHI3_TOKENS, {"<|user|>": {"rstrip": True}}, "w4", True),
        ("w4", PHI3_TOKENS, {**BEHIND, "<s>": {"lstrip": True}}, "phi-3 w4", True),
        ("phi-4", PHI3_TOKENS, {"<|user|>": {"single_word": True}}, "phi-4", True),
    ],
    ids=["named", "kept", "no-spaces-removed", "tokens-missing", "some", "in-front", "words"],
)
def test_the_name_tells_llama_cpp_of_spaces_behind_tokens(
    name: str,
    tokens: tuple[str, ...],
    flags: dict[str, dict[str, bool]],
    expected: str,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    added = {number: tokenizers.AddedToken(text, **flags.get(text, {})) for number, text in enumerate(tokens)}
    assert name_in_file(name, SimpleNamespace(added_tokens_decoder=added), {*tokens}) == expected
    assert ("write no spaces there" in caplog.text) == is_told


def test_a_tokenizer_that_changes_text_is_refused(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path)
    found = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**found, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(DeploymentError, match="Lowercase"):
        convert(folder, tmp_path / "a.gguf", "gguf", check=False)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packed_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"ends in \.gguf"):
        convert(source, tmp_path / "out", "gguf")
    tokenizer = source / "tokenizer.json"
    kept = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({**kept, "model": {"type": "Unigram"}}))
    with pytest.raises(DeploymentError, match="written for byte-level BPE"):
        convert(source, tmp_path / "a.gguf", "gguf")
    with monkeypatch.context() as patch:
        patch.setattr(gguf_architectures, "ARCHITECTURES", {})
        with pytest.raises(DeploymentError, match="model type 'llama'"):
            convert(source, tmp_path / "a.gguf", "gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*gguf"):
        convert(source, tmp_path / "a.gguf", "gguf")
    assert not list(tmp_path.glob("*.gguf"))
