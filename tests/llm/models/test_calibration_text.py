"""Calibration text: every kind of source, windows that differ, and refusals that say what to give."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError, MissingExtraError
from sparsebit.llm.models.calibration_text import calibration_tokens, read_documents, token_stream, windows


class Letters:
    """A tokenizer whose tokens are characters."""

    chat_template: str | None = "{{ messages }}"

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        assert not tokenize
        if not messages:
            raise IndexError("as templates do")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    assert list(read_documents(write(tmp_path / "a.txt", "one\n\ntwo"))) == ["one\n\ntwo"]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"id": 1, "text": "one"}), "", json.dumps({"content": "two"}), json.dumps("three")]
    assert list(read_documents(write(tmp_path / "a.jsonl", "\n".join(lines)))) == ["one", "two", "three"]


class LettersWithStart(Letters):
    """Begins a text with token 1, unless it is told not to."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, torch.Tensor]:
        tokens = super().__call__(text)["input_ids"]
        return {
            "input_ids": torch.cat([torch.ones(1, 1, dtype=torch.int64), tokens], 1) if add_special_tokens else tokens
        }


def test_a_chat_template_writes_the_beginning_itself(tmp_path: Path) -> None:
    chat = write(tmp_path / "a.jsonl", json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert token_stream(chat, LettersWithStart(), chat_template=True).tolist() == [*map(ord, "<user>hi")]
    assert token_stream(write(tmp_path / "a.txt", "hi"), LettersWithStart()).tolist() == [1, *map(ord, "hi")]


def test_separators_inside_of_strings_and_byte_order_marks(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four\x0cfive"]
    lines = "\ufeff" + "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    assert list(read_documents(write(tmp_path / "a.jsonl", lines))) == texts
    assert list(read_documents(write(tmp_path / "a.txt", "\ufeffone"))) == ["one"]


@pytest.mark.parametrize("suffix", ["json", "parquet", "arrow", "csv"])
def test_files_whose_syntax_is_not_text(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigError, match="is not text"):
        list(read_documents(write(tmp_path / f"a.{suffix}", '[{"text": "one"}]')))


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a.jsonl", '{"text": "a"}')
    write(tmp_path / "sub" / "c.md", "c")
    write(tmp_path / "ignored.bin", "x")
    assert list(read_documents(tmp_path)) == ["a", "b", "c"]


def test_a_chat_template_reads_messages(tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    source = write(tmp_path / "a.jsonl", json.dumps(line))
    assert list(read_documents(source, tokenizer=Letters(), chat_template=True)) == ["<user>hi<assistant>ho"]
    without = Letters()
    without.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        list(read_documents(source, tokenizer=without, chat_template=True))


def test_a_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "set")
    assert list(read_documents(tmp_path / "set")) == ["one", "two"]


def fake_datasets(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """A package whose `load_from_disk` gives `found`, or raises it."""

    def load_from_disk(_: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    package = SimpleNamespace(DatasetDict=dict, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", package)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{"text": "a"}, {"text": None}], "row 1: its text is None, not a text"),
        ([{"text": [1, 2]}], r"row 0: its text is \[1, 2\]"),
        (IndexError("list index out of range"), r"cannot be read \(IndexError"),
    ],
    ids=["none", "list", "damaged"],
)
def test_odd_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any, message: str) -> None:
    write(tmp_path / "dataset_info.json", "{}")
    fake_datasets(monkeypatch, found)
    with pytest.raises(ConfigError, match=message):
        list(read_documents(tmp_path))


def test_which_split_is_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "dataset_dict.json", "{}")
    fake_datasets(monkeypatch, {"test": [{"text": "t"}], "validation": [{"text": "v"}]})
    assert list(read_documents(tmp_path)) == ["t"]
    assert "['test', 'validation']: 'test' is read" in caplog.text


def test_files_that_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", ".hidden.txt", ".git/b.txt", "rows.parquet"):
        write(tmp_path / name, name)
    assert list(read_documents(tmp_path)) == ["a.txt"]
    assert "rows.parquet, which is not read" in caplog.text


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "<user>hi<assistant>ho"),
        ([{"speaker": "a", "words": "hi"}], "has no role and content"),
        ([{"role": "user", "content": None}], "has no role and content"),
        ([], "refuses the messages"),
    ],
    ids=["ShareGPT", "other keys", "no content", "empty"],
)
def test_messages_in_other_words(tmp_path: Path, messages: Any, expected: str) -> None:
    source = write(tmp_path / "a.jsonl", json.dumps({"conversations": messages}))
    if expected.startswith("<"):
        assert list(read_documents(source, tokenizer=Letters(), chat_template=True)) == [expected]
        return
    with pytest.raises(ConfigError, match=f"jsonl:1: .*{expected}"):
        list(read_documents(source, tokenizer=Letters(), chat_template=True))


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_a_datasets_folder_without_the_package(tmp_path: Path) -> None:
    write(tmp_path / "dataset_info.json", "{}")
    with pytest.raises(MissingExtraError, match="pip install datasets"):
        list(read_documents(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{", "a.jsonl:1: not valid JSON"),
        ("a.jsonl", '{"text": "x"}\n{"words": "x"}', r"a\.jsonl:2: no text or content or document in it \(words\)"),
        ("a.jsonl", "3", r"no text .* \(int\)"),
    ],
    ids=["broken", "other-key", "number"],
)
def test_lines_without_text_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_documents(write(tmp_path / name, text)))


def test_sources_without_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        list(read_documents(tmp_path / "nothing.txt"))
    with pytest.raises(ConfigError, match="holds no"):
        list(read_documents(tmp_path))
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="UTF-8"):
        list(read_documents(tmp_path / "latin.txt"))
    with pytest.raises(ConfigError, match="needs messages"):
        list(read_documents(write(tmp_path / "a.txt", "x"), tokenizer=Letters(), chat_template=True))


def test_windows_follow_each_other() -> None:
    found = windows(torch.arange(11), 3)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows(torch.arange(11), 3, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="3 windows of 3 tokens, and 4 are wanted"):
        windows(torch.arange(11), 3, 4)
    with pytest.raises(ConfigError, match="allowed: 2 or more"):
        windows(torch.arange(11), 1)


def test_samples_are_different_windows_and_repeatable(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "".join(chr(40 + number) for number in range(60)))
    first = calibration_tokens(source, Letters(), num_samples=8, length=6, seed=1)
    again = calibration_tokens(source, Letters(), num_samples=8, length=6, seed=1)
    other = calibration_tokens(source, Letters(), num_samples=8, length=6, seed=2)
    assert first.shape == (8, 6)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 8
    with pytest.raises(ConfigError, match="has 10 windows of 6 tokens, and 11 are wanted"):
        calibration_tokens(source, Letters(), num_samples=11, length=6)


def test_the_stream_stops_at_its_limit(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", "\n".join(json.dumps("abcd") for _ in range(5)))
    assert len(token_stream(source, Letters(), limit=6)) == 6
    assert len(token_stream(source, Letters())) == 20


@pytest.mark.parametrize("text", [
    "\0" * 5000, " \n" * 5000, "\t\u3000\u00a0" * 3000, "a" + "\n" * 5000, "\0 \n" * 3000, "\u200b\u00ad\u2060" * 3000,
], ids=["NUL", "blank", "wide spaces", "almost blank", "NUL and blank", "no width"])  # fmt: skip
def test_blank_text_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="characters are visible"):
        calibration_tokens(tmp_path / "text.txt", Letters(), num_samples=2, length=16)
    lines = "\n".join(json.dumps({"text": text}) for _ in range(3))
    (tmp_path / "text.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(ConfigError, match="characters are visible"):
        token_stream(tmp_path / "text.jsonl", Letters())


@pytest.mark.parametrize(
    "text",
    ["h\0e\0l\0l\0o\0 \0" * 500, "\x01\x02ab" * 999, "caf\ufffd \ufffd\ufffd" * 500, "\ufeffab" * 999],
    ids=["UTF-16", "control characters", "decoded wrongly", "byte-order marks"],
)
def test_damaged_text_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="another encoding, or it is not text"):
        token_stream(tmp_path / "text.txt", Letters())


def test_texts_of_other_scripts_pass(tmp_path: Path) -> None:
    persian, thai, emoji = "\u0645\u06cc\u200c\u0631\u0648\u0645 ", "\u0e04\u0e33\u200b", "\U0001f468\u200d\U0001f469 "
    (tmp_path / "text.txt").write_text((persian + thai + emoji) * 99 + "one \ufffd\n", encoding="utf-8")
    assert len(token_stream(tmp_path / "text.txt", Letters())) > 999
