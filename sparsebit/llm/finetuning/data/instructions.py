"""Reads instructions from JSON lines as tokens, and marks the tokens that are learned: those of the responses.

A line is a prompt with its response, the keys of Alpaca, or messages for the tokenizer's chat template. The template
writes one text for a whole conversation, so the tokens of an answer are found by comparing the texts with and without
it (`_of_messages`). A line that is not understood is an error: skipped lines would train on other data than intended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.tuning import TooLong
from sparsebit.llm.models.calibration_text import parsed, rendered

log = logging.getLogger(__name__)
_ALLOWED = (
    '{"prompt": ..., "response": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or '
    '{"instruction": ..., "input": ..., "output": ...}'
)


@dataclass(frozen=True)
class Sample:
    """`tokens`, and for each whether it is learned: the model predicts it from the tokens before it."""

    tokens: tuple[int, ...]
    is_learned: tuple[bool, ...]

    @property
    def num_learned(self) -> int:
        return sum(self.is_learned[1:])  # no token precedes the first one


def read_instructions(
    path: Path, tokenizer: Any, *, length: int, chat_template: bool = False, too_long: TooLong = "error"
) -> list[Sample]:
    """The samples of a file of JSON lines, in order; a line that is not an instruction is an error that names it.

    A line is a prompt with its response, the same with the keys of Alpaca, or a list of messages, which the tokenizer's
    chat template turns into text; each message of the assistant is learned. `chat_template`: prompts and responses
    become messages too; without it they are concatenated, with the end-of-text token after the response.
    `too_long`: how to handle samples of more than `length` tokens.
    """
    if tokenizer.eos_token_id is None:
        log.warning("the tokenizer has no end-of-text token: the model will not learn where a response ends")
    samples: list[Sample] = []
    num_dropped = num_cut = 0
    for where, line in _lines(path):
        sample = _sample(parsed(line, where), where, tokenizer, chat_template)
        if len(sample.tokens) > length:
            if too_long == "error":
                raise ConfigError(
                    f"{where}: the sample has {len(sample.tokens)} tokens, and a row takes {length}: give a larger "
                    "length, or choose what happens to such samples: too_long 'cut' or 'drop' (--too-long)"
                )
            sample = Sample(sample.tokens[:length], sample.is_learned[:length])
            is_dropped = too_long == "drop" or not sample.num_learned
            num_dropped, num_cut = num_dropped + is_dropped, num_cut + (not is_dropped)
            if is_dropped:
                continue
        samples.append(sample)
    if num_cut or num_dropped:
        log.warning(
            "%s: of %d samples %d were cut to %d tokens and %d dropped as too long",
            *(path, len(samples) + num_dropped, num_cut, length, num_dropped),
        )
    if not samples:
        raise ConfigError(f"{path} holds no sample; give JSON lines such as {_ALLOWED}")
    return samples


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not empty, with its place in the file."""
    if not path.is_file():
        raise ConfigError(f"data {path} is not a file; give JSON lines such as {_ALLOWED}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from None
            if text.strip():
                yield where, text


def _sample(row: Any, where: str, tokenizer: Any, chat_template: bool) -> Sample:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON {type(row).__name__}; give an object such as {_ALLOWED}")
    if "messages" in row:
        return _of_messages(_checked(row["messages"], where), where, tokenizer)
    prompt, response = _pair(row, where)
    if chat_template:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return _of_messages(messages, where, tokenizer)
    front = _tokens(tokenizer, prompt, special=True)
    back = _tokens(tokenizer, response, special=False)
    if tokenizer.eos_token_id is not None:
        back = [*back, int(tokenizer.eos_token_id)]
    # Some tokenizers end a text with the end-of-text token: it belongs after the response.
    while front and front[-1] == tokenizer.eos_token_id:
        front.pop()
    return _learned([(front, False), (back, True)], where)


def _pair(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    keys = ("prompt", "response") if "prompt" in row or "response" in row else ("instruction", "output")
    problem = None
    for key in (*keys, *(["input"] if "input" in row and keys[0] == "instruction" else [])):
        if not isinstance(row.get(key), str):
            what = f"its {key} is a {type(row[key]).__name__}, not a text" if key in row else f"it has no {key}"
            problem = problem or f"{what} (keys: {', '.join(map(str, row)) or 'none'}); give {_ALLOWED}"
    if problem is None and not row[keys[1]]:
        problem = f"its {keys[1]} is empty; there is nothing to learn"
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    more = f"\n\n{row['input']}" if keys[0] == "instruction" and row.get("input") else ""
    return row[keys[0]] + more, row[keys[1]]


def _checked(messages: Any, where: str) -> list[dict[str, str]]:
    problem = None
    if not isinstance(messages, list) or not messages:
        problem = "messages are a list of one or more objects with role and content"
    else:
        for number, one in enumerate(messages):
            if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
                problem = problem or f"message {number} is not an object with the texts role and content"
        if problem is None and not any(message["role"] == "assistant" for message in messages):
            problem = "no message has the role assistant; there is nothing to learn"
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    return list(messages)


def _of_messages(messages: list[dict[str, str]], where: str, tokenizer: Any) -> Sample:
    """Text that the template puts before an answer is read; text that it adds with the answer is learned."""
    pieces: list[tuple[list[int], bool]] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        front = rendered(tokenizer, messages[:number], where, add_generation_prompt=True)
        whole = rendered(tokenizer, messages[: number + 1], where)
        if not front.startswith(done) or not whole.startswith(front) or whole == front:
            raise ConfigError(
                f"{where}: the chat template does not write message {number} after the messages before it, so "
                "that answer and question cannot be separated; give prompt and response, or one answer a sample"
            )
        pieces.append((_tokens(tokenizer, front[len(done) :], special=False), False))
        pieces.append((_tokens(tokenizer, whole[len(front) :], special=False), True))
        done = whole
    return _learned(pieces, where)


def _tokens(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _learned(pieces: list[tuple[list[int], bool]], where: str) -> Sample:
    tokens = [token for piece, _ in pieces for token in piece]
    marks = [learned for piece, learned in pieces for _ in piece]
    sample = Sample(tuple(tokens), tuple(marks))
    if not sample.num_learned:
        raise ConfigError(f"{where}: the response has no token; there is nothing to learn")
    return sample
