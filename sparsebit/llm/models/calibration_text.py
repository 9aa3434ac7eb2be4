"""Text for calibration and evaluation: from a file, a folder, JSON lines or a datasets folder, as windows of tokens.

Wrongly read text would silently make a wrong calibration, so files of other kinds, other encodings and
binary content are errors. Documents are joined to one stream of tokens, which is cut into windows.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, import_problem

log = logging.getLogger(__name__)
_PLAIN, _LINES = (".txt", ".text", ".md"), (".jsonl", ".ndjson")
_DATA = (".json", ".parquet", ".arrow", ".csv", ".tsv")  # their syntax would be mistaken for text
# Keys for the text in a line of JSON or a row of a dataset, in order of preference.
_TEXT_KEYS = ("text", "content", "document")
_CHAT_KEYS = ("messages", "conversations")
# Characters that correctly decoded text does not have: NUL, control characters, replacements, byte-order marks.
_DAMAGE = r"\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffd"
_DAMAGED = re.compile(f"[{_DAMAGE}]+")
_INVISIBLE = re.compile(rf"[\s{_DAMAGE}\u00ad\u200b-\u200f\u2060-\u2064]+")
_LEAST_VISIBLE, _MOST_DAMAGED = 0.05, 0.05  # limits, as shares of the characters of a text
_ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT names them


def read_documents(source: Path, *, tokenizer: Any = None, chat_template: bool = False) -> Iterator[str]:
    """The documents of a text file (one), of JSON lines (one each), of a datasets folder, or of a folder of these.

    `chat_template`: lines or rows hold `messages`, which the tokenizer's template turns into text.
    """
    if not source.exists():
        raise ConfigError(f"text {source} does not exist; give a text file, a .jsonl file or a folder of these")
    if source.is_dir():
        if is_dataset(source):
            for number, row in enumerate(_dataset_rows(source)):
                yield _document(row, f"{source}, row {number}", tokenizer, chat_template)
            return
        for path in text_files(source):
            yield from read_documents(path, tokenizer=tokenizer, chat_template=chat_template)
        return
    if source.suffix.lower() in _LINES:
        for number, line in enumerate(_read(source).split("\n"), 1):  # strings may hold other line separators
            if line.strip():
                yield _document(_parsed(line, f"{source}:{number}"), f"{source}:{number}", tokenizer, chat_template)
        return
    if source.suffix.lower() in _DATA:
        raise ConfigError(f"text {source}: a {source.suffix} file is not text; write its texts to a .jsonl file")
    if chat_template:
        raise ConfigError(f"text {source}: a chat template needs messages; give JSON lines with a list `messages` each")
    yield _read(source)


def is_dataset(folder: Path) -> bool:
    """Whether the folder was written by the package datasets."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def text_files(folder: Path) -> list[Path]:
    """The files of a folder that hold text, and of the folders in it."""
    every = sorted(path for path in folder.rglob("*") if not _is_hidden(path.relative_to(folder)))
    files = [path for path in every if path.suffix.lower() in (*_PLAIN, *_LINES)]
    others = [path for path in every if path.suffix.lower() in _DATA]
    if files and others:
        log.warning("%s holds %s, which is not read: it is not text", folder, others[0].relative_to(folder))
    if not files:
        raise ConfigError(
            f"folder {folder} holds no {', '.join((*_PLAIN, *_LINES))} file, and is not a datasets folder"
        )
    return files


def token_stream(source: Path, tokenizer: Any, *, chat_template: bool = False, limit: int | None = None) -> Tensor:
    """The tokens of all documents one after another, `(n,)`; `limit`: stop at this many."""
    found: list[Tensor] = []
    count = num_letters = num_visible = num_damaged = 0
    for document in read_documents(source, tokenizer=tokenizer, chat_template=chat_template):
        # `verbose`: a text that is longer than the model's rows is cut later, so no warning. Chat templates write the
        # first token themselves.
        try:
            how = {"return_attention_mask": False, "verbose": False, "add_special_tokens": not chat_template}
            # A list: transformers takes seconds to make a tensor of a long one.
            tokens = torch.as_tensor(tokenizer(document, **how)["input_ids"], dtype=torch.int64).flatten()
        except Exception as error:  # the package tokenizers raises no special class
            raise ConfigError(f"the model's tokenizer does not take the text of {source} ({error})") from error
        found.append(tokens)
        count += len(tokens)
        num_letters += len(document)
        num_visible += len(_INVISIBLE.sub("", document))
        num_damaged += len(document) - len(_DAMAGED.sub("", document))
        if limit is not None and count >= limit:
            break
    if num_visible < _LEAST_VISIBLE * num_letters:
        raise ConfigError(
            f"text {source}: {num_visible} of its {num_letters} characters are visible, the rest is white space or "
            "NUL; give text as the model will read it, in UTF-8"
        )
    if num_damaged > _MOST_DAMAGED * num_letters:
        raise ConfigError(
            f"text {source}: {num_damaged} of its {num_letters} characters are NUL, control characters or U+FFFD: it "
            "was written or read in another encoding, or it is not text; give UTF-8"
        )
    return torch.cat(found)[:limit] if found else torch.zeros(0, dtype=torch.int64)


def windows(tokens: Tensor, length: int, num_windows: int | None = None) -> Tensor:
    """The stream cut into consecutive windows, `(num_windows, length)`; the remainder at its end is dropped."""
    if length < 2:
        raise ConfigError(f"windows of {length} tokens: allowed: 2 or more")
    if num_windows is not None and num_windows < 1:
        raise ConfigError(f"num_windows={num_windows}: allowed: 1 or more; None for all")
    available = len(tokens) // length
    if available < (num_windows or 1):
        raise ConfigError(
            f"the text has {len(tokens)} tokens: {available} windows of {length}, and {num_windows or 1} are wanted; "
            "give more text, fewer or shorter windows"
        )
    count = available if num_windows is None else num_windows
    return tokens[: count * length].view(count, length)


def need_embeddings(tokens: Tensor, model: Any) -> None:
    """Raise for tokens without an embedding: on a GPU they would end the process."""
    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if layer is None:
        return
    count = int(layer.weight.shape[0])
    highest = int(tokens.max()) if tokens.numel() else 0
    if tokens.numel() and int(tokens.min()) < 0:
        raise ConfigError(f"the token {int(tokens.min())}: tokens count from 0")
    if highest >= count:
        raise ConfigError(
            f"the text has the token {highest}, and the model has embeddings for {count} tokens: its tokenizer is of "
            "another model, or has tokens that were added without training the model for them"
        )


def need_positions(length: int, model: Any, option: str = "--length") -> None:
    """Warn of rows that are longer than the model was made for; raise if it has no position for them.

    `option`: the option that makes them shorter.
    """
    config = getattr(model, "config", None)
    most = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or length <= most:
        return
    tables = [part for name, part in model.named_modules() if isinstance(part, nn.Embedding) and "pos" in name]
    if tables:
        raise ConfigError(f"{length} tokens in a row, and the model has {most} positions; give fewer ({option})")
    log.warning(
        "%d tokens in a row, and the model was made for %d at most (max_position_embeddings): beyond these its "
        "predictions may be far worse; give fewer (%s)",
        *(length, most, option),
    )


def calibration_tokens(
    source: Path,
    tokenizer: Any,
    *,
    num_samples: int,
    length: int,
    seed: int = 0,
    chat_template: bool = False,
) -> Tensor:
    """`num_samples` different windows of the text, drawn at random, `(num_samples, length)`."""
    every = windows(token_stream(source, tokenizer, chat_template=chat_template), length)
    if len(every) < num_samples:
        raise ConfigError(
            f"text {source} has {len(every)} windows of {length} tokens, and {num_samples} are wanted; give more text, "
            "or ask for fewer or shorter samples"
        )
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    return every[order[:num_samples]]


def _document(row: Any, where: object, tokenizer: Any, chat_template: bool) -> str:
    if isinstance(row, str) and not chat_template:
        return row
    keys = _CHAT_KEYS if chat_template else _TEXT_KEYS
    value = next((row[key] for key in keys if key in row), None) if isinstance(row, dict) else None
    if chat_template and isinstance(value, list):
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("this tokenizer has no chat template; give plain text instead")
        return _rendered(_messages(value, where), where, tokenizer)
    if not chat_template and isinstance(value, str):
        return value
    key = next((key for key in keys if key in row), None) if isinstance(row, dict) else None
    if key is not None:
        wanted = "a list of messages" if chat_template else "a text"
        raise ConfigError(f"{where}: its {key} is {value!r:.60}, not {wanted}; leave such rows out")
    found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    raise ConfigError(f"{where}: no {' or '.join(keys)} in it ({found}); name the text so")


def _messages(value: list[Any], where: object) -> list[Any]:
    """The messages with `role` and `content`: a template would write nothing for unknown keys."""
    found: list[Any] = []
    for message in value:
        if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
            message = {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
        has_content = isinstance(message, dict) and (message.get("content") is not None or message.get("tool_calls"))
        if not has_content or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"{where}: the message {message!r:.80} has no role and content; give both, or from and value"
            )
        found.append(message)
    return found


def _rendered(messages: list[Any], where: object, tokenizer: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise any kind of exception, for example if roles do not take turns
        raise ConfigError(f"{where}: the chat template refuses the messages ({error})") from error


def _is_hidden(path: Path) -> bool:
    """Whether the path, or one of its folders, belongs to an editor or to git."""
    return any(part.startswith(".") for part in path.parts)


def _dataset_rows(folder: Path) -> Iterator[Any]:
    try:
        from datasets import DatasetDict, load_from_disk
    except Exception:  # a broken package raises anything
        raise ConfigError(
            f"the dataset {folder} needs the package 'datasets', which {import_problem('datasets')} pip install "
            "datasets; or give its text as JSON lines"
        ) from None
    try:
        found = load_from_disk(str(folder))
        if isinstance(found, DatasetDict):
            name = "train" if "train" in found else next(iter(found))
            if len(found) > 1:
                log.warning("%s has the splits %s: %r is read; give the folder of another", folder, list(found), name)
            found = found[name]
        yield from found
    except Exception as error:  # of pyarrow, of JSON files, of the package itself
        raise ConfigError(
            f"the dataset {folder} cannot be read ({error!r}); save it again, or give JSON lines"
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text {path} cannot be read ({error}); text is UTF-8") from None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from None
