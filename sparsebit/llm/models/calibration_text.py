"""Text for calibration and evaluation: from a file, a folder, JSON lines or a datasets folder, as windows of tokens.

Wrongly read text would silently make a wrong calibration, so files of other kinds, other encodings and
binary content are errors. Documents are joined to one stream of tokens, which is cut into windows.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.models.hub_classes import package

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
    """The documents of a text file, of JSON lines (one each), of a datasets folder, or of a folder of these.
    `chat_template`: lines or rows hold `messages`, which the tokenizer's template turns into text.
    """
    kind = source.suffix.lower()
    if not source.exists():
        raise ConfigError(f"text {source} does not exist; give a text file, a .jsonl file or a folder of these")
    if source.is_dir() and is_dataset(source):
        for number, row in enumerate(_dataset_rows(source)):
            yield _document(row, f"{source}, row {number}", tokenizer, chat_template)
    elif source.is_dir():
        for path in text_files(source):
            yield from read_documents(path, tokenizer=tokenizer, chat_template=chat_template)
    elif kind in _LINES:
        for number, line in enumerate(_read(source).split("\n"), 1):  # strings may hold other line separators
            if line.strip():
                yield _document(parsed(line, f"{source}:{number}"), f"{source}:{number}", tokenizer, chat_template)
    elif kind in _DATA or chat_template:
        what = f"a {kind} file is not text" if kind in _DATA else "a chat template needs messages"
        raise ConfigError(f"text {source}: {what}; write it as .jsonl, with `text` or a list `messages` in each line")
    else:
        yield _read(source)


def is_dataset(folder: Path) -> bool:
    """Whether the folder was written by the package datasets."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def text_files(folder: Path) -> list[Path]:
    """The files of a folder that hold text, and of the folders in it."""
    every = [path for path in sorted(folder.rglob("*")) if not _is_hidden(path.relative_to(folder))]
    files = [path for path in every if path.suffix.lower() in (*_PLAIN, *_LINES)]
    others = [path for path in every if path.suffix.lower() in _DATA]
    if files and others:
        log.warning("%s holds %s, which is not read: it is not text", folder, others[0].relative_to(folder))
    if not files:
        kinds = ", ".join((*_PLAIN, *_LINES))
        raise ConfigError(f"folder {folder} holds no {kinds} file, and is not a datasets folder")
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
    bad = None
    if num_visible < _LEAST_VISIBLE * num_letters:
        bad = f"{num_visible} of its {num_letters} characters are visible, the rest is white space or NUL"
    elif num_damaged > _MOST_DAMAGED * num_letters:
        bad = f"{num_damaged} of its {num_letters} characters are NUL, control characters or U+FFFD"
    if bad is not None:
        raise ConfigError(f"text {source}: {bad}: it is in another encoding, or it is not text; give UTF-8")
    return torch.cat(found)[:limit] if found else torch.zeros(0, dtype=torch.int64)


def windows(tokens: Tensor, length: int, num_windows: int | None = None) -> Tensor:
    """The stream cut into consecutive windows, `(num_windows, length)`; the remainder at its end is dropped."""
    if length < 2 or (num_windows is not None and num_windows < 1):
        raise ConfigError(f"windows of {length} tokens, num_windows={num_windows}: allowed: 2 or more, 1 or more")
    available = len(tokens) // length
    if available < (num_windows or 1):
        raise too_few_windows(f"of {len(tokens)} tokens", available, length, num_windows or 1)
    count = available if num_windows is None else num_windows
    return tokens[: count * length].view(count, length)


def too_few_windows(text: object, available: int, length: int, wanted: int) -> ConfigError:
    return ConfigError(
        f"text {text} has {available} windows of {length} tokens, and {wanted} are wanted; give more text, or ask for "
        "fewer or shorter ones (--num-samples, --num-windows, --length)"
    )


def shuffled(windows: Tensor, seed: int) -> Tensor:
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]


def need_embeddings(tokens: Tensor, model: Any) -> None:
    """Raise for tokens without an embedding: on a GPU they would end the process."""
    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if layer is None or not tokens.numel():
        return
    count, lowest, highest = int(layer.weight.shape[0]), int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= count:
        raise ConfigError(
            f"the text has the token {lowest if lowest < 0 else highest}, and the model has embeddings for {count} "
            "tokens: its tokenizer is of another model, or has tokens that were added without training for them"
        )


def need_positions(length: int, model: Any, option: str = "--length") -> None:
    """Warn of rows longer than the model was made for; raise if it has no position. `option`: makes them shorter."""
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
    source: Path, tokenizer: Any, *, num_samples: int, length: int, seed: int = 0, chat_template: bool = False
) -> Tensor:
    """`num_samples` different windows of the text, drawn at random, `(num_samples, length)`."""
    every = windows(token_stream(source, tokenizer, chat_template=chat_template), length)
    if len(every) < num_samples:
        raise too_few_windows(source, len(every), length, num_samples)
    return shuffled(every, seed)[:num_samples]


def _document(row: Any, where: object, tokenizer: Any, chat_template: bool) -> str:
    if isinstance(row, str) and not chat_template:
        return row
    keys = _CHAT_KEYS if chat_template else _TEXT_KEYS
    found = {key: row[key] for key in keys if key in row} if isinstance(row, dict) else {}
    for key, value in found.items():
        if chat_template and isinstance(value, list):
            return rendered(tokenizer, _messages(value, where), where)
        if not chat_template and isinstance(value, str):
            return value
        wanted = "a list of messages" if chat_template else "a text"
        raise ConfigError(f"{where}: its {key} is {value!r:.60}, not {wanted}; leave such rows out")
    names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    raise ConfigError(f"{where}: no {' or '.join(keys)} in it ({names}); name the text so")


def _messages(value: list[Any], where: object) -> list[Any]:
    """The messages with `role` and `content`: a template would write nothing for unknown keys."""
    found: list[Any] = []
    for message in value:
        if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
            message = {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
        has_content = isinstance(message, dict) and (message.get("content") is not None or message.get("tool_calls"))
        if not has_content or not isinstance(message.get("role"), str):
            given = f"{message!r:.80}"
            raise ConfigError(f"{where}: the message {given} has no role and content; give both, or from and value")
        found.append(message)
    return found


def rendered(tokenizer: Any, messages: list[Any], where: object, **how: Any) -> str:
    """The messages as the tokenizer's chat template writes them."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{where}: no chat template: this tokenizer has none; give plain text, or prompt, response")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
    except Exception as error:  # templates raise any kind of exception, for example if roles do not take turns
        raise ConfigError(f"{where}: the chat template refuses the messages ({error})") from error


def _is_hidden(path: Path) -> bool:
    """Whether the path, or one of its folders, belongs to an editor or to git."""
    return any(part.startswith(".") for part in path.parts)


def _dataset_rows(folder: Path) -> Iterator[Any]:
    datasets = package("datasets", "", f"the dataset {folder}, instead of JSON lines,")
    try:
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict):
            name = "train" if "train" in found else next(iter(found))
            if len(found) > 1:
                log.warning("%s has the splits %s: %r is read; give the folder of another", folder, list(found), name)
            found = found[name]
        yield from found
    except Exception as error:  # of pyarrow, of JSON files, of the package itself
        problem = f"cannot be read ({error!r}); save it again, or give JSON lines"
        raise ConfigError(f"the dataset {folder} {problem}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text {path} cannot be read ({error}); text is UTF-8") from None


def parsed(line: str, where: str) -> Any:
    """A line of JSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from None


# The default number of tokens: this many for each column of the widest layer, within these bounds.
TOKENS_PER_COLUMN, LEAST_TOKENS, MOST_TOKENS = 8, 64 * 512, 256 * 512
_MOST_KINDS = 16  # with up to this many files, each counts as a kind of text; with more, the folder is one kind


@dataclass(frozen=True)
class DrawnText:
    """`tokens (samples, length)`, and how many of these windows each text gave, by its path."""

    tokens: Tensor
    shares: Mapping[str, int]


def default_num_windows(widest: int, length: int) -> int:
    """The number of windows for a model whose widest layer has this many columns.

    >>> default_num_windows(1408, 512), default_num_windows(14336, 512), default_num_windows(28672, 512)
    (64, 224, 256)
    """
    return ceil(min(max(TOKENS_PER_COLUMN * widest, LEAST_TOKENS), MOST_TOKENS) / length)


def draw_windows(
    texts: Sequence[Path],
    tokenizer: Any,
    *,
    num_samples: int | None,
    length: int,
    widest: int,
    seed: int = 0,
    chat_template: bool = False,
    is_limit: bool = False,
) -> DrawnText:
    """Different windows of the texts, drawn at random: as many from each text, as far as it has them.

    A folder of 2 to 16 text files counts as that many texts. `num_samples`: None for a number that follows the widest
    layer, or all windows, if they have `LEAST_TOKENS` or more. `is_limit`: fewer are drawn if there are not as many.
    """
    streams: dict[str, Tensor] = {}
    for text in texts:
        streams |= _streams(text, tokenizer, length, chat_template)
    kinds = {name: windows(tokens, length) for name, tokens in streams.items()}
    available = {name: len(every) for name, every in kinds.items()}
    wanted = num_samples
    if wanted is None:
        fewest = max(sum(available.values()), ceil(LEAST_TOKENS / length))
        wanted = min(default_num_windows(widest, length), fewest)
    shares = even_shares(available, wanted)
    if sum(shares.values()) < wanted and not is_limit:
        raise too_few_windows(", ".join(map(str, texts)), sum(available.values()), length, wanted)
    drawn = []
    for number, (name, every) in enumerate(kinds.items()):
        drawn.append(shuffled(every, seed + number)[: shares[name]])
    tokens = torch.cat(drawn)
    if len(kinds) > 1:  # mix the kinds, because some methods only read the first windows
        tokens = shuffled(tokens, seed)
    return DrawnText(tokens, shares)


def even_shares(available: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Parts of `wanted` that differ by at most one, except where less is available.

    >>> even_shares({"books": 100, "code": 3, "chat": 100}, 32)
    {'books': 15, 'code': 3, 'chat': 14}
    """
    shares = dict.fromkeys(available, 0)
    for _ in range(min(wanted, sum(available.values()))):
        poorest = min((name for name in shares if shares[name] < available[name]), key=lambda name: shares[name])
        shares[poorest] += 1
    return shares


def _streams(text: Path, tokenizer: Any, length: int, chat_template: bool) -> dict[str, Tensor]:
    """The tokens of each kind of text; files of a folder are kinds if there are few and each fills a window."""
    files = [text] if not text.is_dir() or is_dataset(text) else text_files(text)
    if len(files) > _MOST_KINDS:
        return {str(text): token_stream(text, tokenizer, chat_template=chat_template)}
    found = {str(file): token_stream(file, tokenizer, chat_template=chat_template) for file in files}
    if len(files) > 1 and min(map(len, found.values())) < length:
        return {str(text): torch.cat(list(found.values()))}
    return found
