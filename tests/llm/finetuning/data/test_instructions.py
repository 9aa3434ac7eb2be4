"""Instructions: what is learned of each form, and lines that are none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.data.instructions import read_instructions
from sparsebit.llm.models.hub_classes import load_tokenizer
from tests.llm.tiny_models import with_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(with_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def learned(tokenizer: Any, path: Path, **how: Any) -> list[tuple[str, str]]:
    """Of each sample its text and the part that is learned."""
    found = []
    for sample in read_instructions(path, tokenizer, length=100, **how):
        chosen = [token for token, mark in zip(sample.tokens, sample.is_learned, strict=True) if mark]
        found.append((tokenizer.decode(sample.tokens), tokenizer.decode(chosen)))
    return found


def test_only_responses_are_learned(tokenizer: Any, tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = written(
        tmp_path / "data.jsonl",
        {"prompt": "say x:", "response": "xx"},
        "",
        {"instruction": "do", "input": "it", "output": "ok"},
        {"instruction": "do", "input": "", "output": "ok"},
        {"messages": messages},
    )
    found = learned(tokenizer, path)
    assert found[0] == ("say x:xx~", "xx~")
    assert found[1][1] == "ok~" and found[1][0].startswith("do") and "it" in found[1][0]
    assert found[2] == ("dook~", "ok~")
    assert found[3] == ("[user]a[assistant]bb[user]c[assistant]d", "[assistant]bb[assistant]d")


def test_prompts_in_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "data.jsonl", {"prompt": "a", "response": "b"})
    assert learned(tokenizer, path, chat_template=True) == [("[user]a[assistant]b", "[assistant]b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "a JSON list"),
        ('"text"', "a JSON str"),
        ({"prompt": "a"}, "it has no response"),
        ({"response": "a"}, "it has no prompt"),
        ({"text": "a"}, "it has no instruction"),
        ({"prompt": 3, "response": "a"}, "its prompt is a int"),
        ({"prompt": "a", "response": None}, "its response is a NoneType"),
        ({"prompt": "a", "response": ""}, "nothing to learn"),
        ({"instruction": "a", "input": 1, "output": "b"}, "its input is a int"),
        ({"messages": []}, "a list of one or more"),
        ({"messages": [{"role": "user"}]}, "message 0 is not an object"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message has the role assistant"),
        ({"prompt": "a" * 80, "response": "b" * 40}, "has 121 tokens, and a row takes 100"),
    ],
    ids=str,
)
def test_a_bad_line_is_named(tokenizer: Any, tmp_path: Path, line: object, message: str) -> None:
    path = written(tmp_path / "data.jsonl", {"prompt": "a", "response": "b"}, line)
    with pytest.raises(ConfigError, match=message) as caught:
        read_instructions(path, tokenizer, length=100)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_bytes_that_are_no_text(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: not UTF-8"):
        read_instructions(path, tokenizer, length=100)


def test_files_without_samples(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no sample"):
        read_instructions(written(tmp_path / "data.jsonl", "", " "), tokenizer, length=100)
    with pytest.raises(ConfigError, match="is not a file"):
        read_instructions(tmp_path, tokenizer, length=100)


def test_long_samples_are_cut_or_dropped(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(
        tmp_path / "data.jsonl",
        {"prompt": "a", "response": "b"},
        {"prompt": "aaa", "response": "bbbbbb"},
        {"prompt": "aaaaaaaa", "response": "b"},  # nothing of the response is left
    )
    with caplog.at_level(logging.WARNING):
        assert [len(one.tokens) for one in read_instructions(path, tokenizer, length=6, too_long="cut")] == [3, 6]
    assert "of 3 samples 1 were cut to 6 tokens and 1 dropped" in caplog.text
    assert [len(one.tokens) for one in read_instructions(path, tokenizer, length=6, too_long="drop")] == [3]


def test_messages_without_a_template(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "data.jsonl", {"messages": [{"role": "assistant", "content": "a"}]})
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="this tokenizer has none"):
        read_instructions(path, tokenizer, length=100)


def test_a_template_that_drops_earlier_answers(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d")]
    path = written(tmp_path / "data.jsonl", {"messages": [{"role": r, "content": c} for r, c in turns]})
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: the chat template does not write message"):
        read_instructions(path, tokenizer, length=100)


def test_a_tokenizer_without_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(with_tokenizer(tmp_path))
    path = written(tmp_path / "data.jsonl", {"prompt": "say x:", "response": "xx"})
    assert learned(tokenizer, path) == [("say x:xx~", "xx~")] and not caplog.text
    tokenizer.eos_token = None
    assert learned(tokenizer, path) == [("say x:xx", "xx")]
    assert "will not learn where a response ends" in caplog.text
