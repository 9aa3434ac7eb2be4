"""Tokenizers of sentencepiece: their files as that package reads them, and their vocabulary in GGUF files."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm import Calibration, Recipe, convert, quantize
from sparsebit.llm.models import hub_classes
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.models.sentencepiece_file import is_sentencepiece, read_sentencepiece
from tests.llm.tiny_models import saved, tiny_model, write_text

LETTERS = ["▁", *"abcdehlort"]
MERGED = ["▁a", "he", "▁he", "ll", "▁hell", "▁hello", "or", "ab"]
BYTE_FALLBACK = bytes([0x98, 0x02, 1])  # field 35 of the trainer's settings
TEXT = "hello a lord ab  abc\n x"


def field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a protocol buffer; numbers below 128."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


def pieces() -> list[tuple[str, float, int]]:
    """Text, score and type of each token, as Llama 2 has them."""
    found = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    found += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    found += [("<|user|>", 0.0, 4)]
    return found + [(text, -float(number), 1) for number, text in enumerate([*MERGED, *LETTERS])]


def write_pieces(folder: Path, *, kind: int = 2, normalizer: bytes = b"") -> Path:
    """`kind`: 1 is unigram, 2 is BPE. Spaces are kept unless `normalizer` says so."""
    data = b"".join(field(1, field(1, text) + field(2, score) + field(3, t)) for text, score, t in pieces())
    data += field(2, field(3, kind) + BYTE_FALLBACK) + field(3, field(3, 1) + field(4, 0) + normalizer)
    (folder / "tokenizer.model").write_bytes(data)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"add_bos_token": True, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_json(folder: Path) -> Path:
    """The same vocabulary as tokenizer.json, which transformers reads without sentencepiece."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {text: number for number, (text, _, _) in enumerate(pieces())}
    cuts = [(text[:place], text[place:]) for text in MERGED for place in range(1, len(text))]
    merges = [pair for pair in cuts if {*pair} <= {*vocab}]
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    inner = tokenizers.Tokenizer(model)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.add_tokens([tokenizers.AddedToken("<|user|>", normalized=False)])
    inner.save(str(folder / "tokenizer.json"))
    return folder


def packed(tmp_path: Path, *, has_json: bool = True, **more: Any) -> Path:
    folder = write_pieces(saved(tiny_model(vocab_size=288), tmp_path / "model"), **more)
    if has_json:
        write_json(folder)
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)
    return quantize(folder, tmp_path / "packed", recipe, check=False).folder


def merged_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """What llama.cpp does: the neighbours with the highest score of their token become one, the left ones first."""
    known = {token: number for number, token in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in itertools.pairwise(parts)]
        pairs = [(scores[known[text]], -place) for place, text in enumerate(joined) if text in known]
        if not pairs:
            break
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    found: list[int] = []
    for part in parts:
        found += [known[part]] if part in known else [known[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def check_gguf(file: Path, tokenizer: Any) -> None:
    """Scores, types, byte tokens and special tokens of the file give the tokens of `tokenizer`."""
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    expected = pieces()
    assert tokens[: len(expected)] == [text for text, _, _ in expected]
    assert scores[: len(expected)] == [score for _, score, _ in expected]
    assert types[: len(expected)] == [kind for _, _, kind in expected]
    assert types[len(expected) :] == [5] * (288 - len(expected))
    assert [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos", "unknown")] == [1, 2, 0]
    assert fields["tokenizer.ggml.add_bos_token"].contents() and fields["tokenizer.ggml.add_space_prefix"].contents()
    wanted = tokenizer(TEXT)["input_ids"]
    assert [1, *merged_by_score(f" {TEXT}", tokens, scores)] == wanted
    read = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert read(TEXT, add_special_tokens=False)["input_ids"] == wanted[1:]


def test_the_file_is_read(tmp_path: Path) -> None:
    found = read_sentencepiece(write_pieces(tmp_path) / "tokenizer.model")
    assert [(piece.text, piece.score, piece.type) for piece in found.pieces] == pieces()
    assert found.kind == "bpe" and not found.changes_text
    for number in (3, 40, 1000):
        damaged = tmp_path / "damaged.model"
        damaged.write_bytes((tmp_path / "tokenizer.model").read_bytes()[:-number])
        assert is_sentencepiece(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_sentencepiece(damaged)


def test_a_file_of_tiktoken_is_another(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert not is_sentencepiece(tmp_path / "tokenizer.model") and not is_sentencepiece(tmp_path / "missing")


def test_without_the_package_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_classes, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="pip install sentencepiece"):
        load_tokenizer(write_pieces(tmp_path))


def test_a_gguf_file_beside_tokenizer_json(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = packed(tmp_path)
    check_gguf(convert(folder, tmp_path / "m.gguf", "gguf", check=False).output, load_tokenizer(folder))


def test_what_llama_cpp_does_not_do_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = packed(tmp_path)
    for more, message in (({"kind": 1}, "is of kind unigram"), ({"normalizer": field(4, 1)}, "changes text")):
        write_pieces(folder, **more)
        with pytest.raises(DeploymentError, match=message):
            convert(folder, tmp_path / "m.gguf", "gguf", check=False)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(DeploymentError, match="copy that file from the download"):
        convert(folder, tmp_path / "m.gguf", "gguf", check=False)


def test_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = packed(tmp_path)
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    vocab = found["model"]["vocab"]
    vocab["b"], vocab["c"] = vocab["c"], vocab["b"]
    file.write_text(json.dumps(found))
    with pytest.raises(DeploymentError, match="they are of different models"):
        convert(folder, tmp_path / "m.gguf", "gguf", check=False)


def test_from_text_to_a_gguf_file_without_tokenizer_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("gguf")
    folder = packed(tmp_path, has_json=False)
    assert (folder / "tokenizer.model").is_file() and not caplog.text
    check_gguf(convert(folder, tmp_path / "m.gguf", "gguf", check=False).output, load_tokenizer(folder))
    text = Calibration(write_text(tmp_path / "text.txt"), num_samples=4, length=16)
    assert quantize(tmp_path / "model", tmp_path / "gptq", Recipe(group_size=32), text, check=False).folder.is_dir()
    assert "other tokens" not in caplog.text
    (folder / "tokenizer_config.json").unlink()
    load_tokenizer(folder)
    assert "transformers makes other tokens than sentencepiece" in caplog.text
