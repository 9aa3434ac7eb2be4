"""Counts mannered words per 10,000 words of prose: in documentation, docstrings, and messages of the package.

`python scripts/plain_words.py` prints a table with a row per kind of text, `--list` adds every hit with its file and
line, and `--check docs errors` exits with 1 if one of these kinds has more than 5 hits per 10,000 words.
Code, links' targets and tables that scripts write are not prose and do not count.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 5.0  # hits per 10,000 words
KINDS = ("docs", "readme", "changelog", "docstrings", "errors", "warnings", "logs", "help")

MANNERED = re.compile(
    r"\b(?:nobody|whoever|somebody|mend(?:s|ed|ing)?|(?:come|comes|came|coming) about|told|tells|gives|stands"
    r"|in words|without a word|beside)\b"
    r"|(?<!\bthere )\b(?:is|are) no(?! longer\b)(?= \w)",
    re.IGNORECASE,
)
# A sentence begins at the start of a paragraph, or after the end of another one.
SENTENCE = r"(?:^|(?<=[.!?:] )|(?<=\n\n))[\s*_>|-]*"
OPENING = re.compile(
    rf"{SENTENCE}((?:Of(?! course\b)|What)\b[^.!?]*|Needed is\b[^.!?]*)(?P<end>[.!?]|\Z)", re.MULTILINE
)
WORD = re.compile("[A-Za-z][A-Za-z'\u2019-]*")

GENERATED = re.compile(r"<!-- begin: [\w ]+ -->.*?<!-- end: [\w ]+ -->", re.DOTALL)
FENCE = re.compile(r"^[ \t]*(?P<mark>```+|~~~+).*?^[ \t]*(?P=mark)[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_PROSE = (
    GENERATED,
    FENCE,
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"(`+)(?!`).+?\1", re.DOTALL),
    re.compile(r"(?<=\])\([^)\s]+\)"),
    re.compile(r"https?://\S+"),
)


@dataclass(frozen=True)
class Text:
    """One stretch of prose of `file`, which begins at `line`."""

    kind: str
    file: Path
    line: int
    prose: str


@dataclass(frozen=True)
class Hit:
    text: Text
    line: int
    words: str


def hits(text: Text) -> list[Hit]:
    """Every mannered word and opening of a sentence in `text`."""
    found = [(match.start(), match[0]) for match in MANNERED.finditer(text.prose)]
    # Questions and headings ("What you see") are fine: they are no subjects of a statement.
    for match in OPENING.finditer(text.prose):
        line_start = text.prose.rfind("\n", 0, match.start(1)) + 1
        is_heading = text.prose[line_start : match.start(1)].lstrip().startswith("#")
        if match["end"] != "?" and not is_heading:
            found.append((match.start(1), " ".join(match[1].split()[:3])))
    return [Hit(text, text.line + text.prose.count("\n", 0, start), words) for start, words in sorted(found)]


def markdown(kind: str, file: Path) -> Text:
    """The prose of a page; what is left out keeps its lines, so that hits are named by the lines of the file."""
    prose = file.read_text(encoding="utf-8")
    for pattern in NOT_PROSE:
        prose = pattern.sub(lambda match: "\n" * match[0].count("\n") or "x", prose)
    return Text(kind, file, 1, prose)


def source(file: Path) -> Iterator[Text]:
    """Docstrings, and the strings of raised errors, warnings, log lines and help texts of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (docstring := ast.get_docstring(node)) is not None:
                first = node.body[0].lineno
                yield Text("docstrings", file, first, without_code(docstring))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from strings("errors", file, [*node.exc.args, *(word.value for word in node.exc.keywords)])
        elif isinstance(node, ast.Call):
            if (kind := kind_of_call(node)) is not None:
                yield from strings(kind, file, node.args)
            yield from strings("help", file, [word.value for word in node.keywords if word.arg in ("help", "epilog")])


def kind_of_call(call: ast.Call) -> str | None:
    if not isinstance(call.func, ast.Attribute):
        return "warnings" if isinstance(call.func, ast.Name) and call.func.id in ("warn", "warn_once") else None
    owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    if call.func.attr == "warn" and owner == "warnings":
        return "warnings"
    if owner.strip("_").lower() in ("logger", "log"):
        if call.func.attr in ("warning", "warning_once"):
            return "warnings"
        if call.func.attr in ("debug", "info", "error", "exception", "log"):
            return "logs"
    return None


def strings(kind: str, file: Path, values: Sequence[ast.expr]) -> Iterator[Text]:
    """Every string in `values`; the fields of an f-string count as one word that is not prose."""
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Text(kind, file, value.lineno, without_code(value.value))
        elif isinstance(value, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in value.values]
            yield Text(kind, file, value.lineno, without_code("".join(parts)))
            fields = [part.value for part in value.values if isinstance(part, ast.FormattedValue)]
            yield from strings(kind, file, fields)
        elif isinstance(value, ast.BinOp):
            yield from strings(kind, file, [value.left, value.right])
        elif isinstance(value, ast.IfExp):
            yield from strings(kind, file, [value.body, value.orelse])


def without_code(text: str) -> str:
    return re.sub(r"(`+)(?!`).+?\1", "x", text, flags=re.DOTALL)


def texts(root: Path) -> Iterator[Text]:
    for page in sorted((root / "docs").rglob("*.md")):
        yield markdown("docs", page)
    for kind, name in (("readme", "README.md"), ("changelog", "CHANGELOG.md")):
        if (root / name).is_file():
            yield markdown(kind, root / name)
    for file in sorted((root / "sparsebit").rglob("*.py")):
        yield from source(file)


def rate(found: Sequence[Hit], num_words: int) -> float:
    """Hits per 10,000 words."""
    return 10_000 * len(found) / num_words if num_words else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every hit with its file and line")
    parser.add_argument("--check", nargs="+", choices=KINDS, default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with docs/, README.md and sparsebit/")
    options = parser.parse_args(arguments)
    found: dict[str, list[Hit]] = {kind: [] for kind in KINDS}
    num_words = dict.fromkeys(KINDS, 0)
    for text in texts(options.root):
        found[text.kind] += hits(text)
        num_words[text.kind] += len(WORD.findall(text.prose))
    if options.list:
        for hit in (hit for kind in options.check or KINDS for hit in found[kind]):
            print(f"{hit.text.kind}: {hit.text.file.relative_to(options.root)}:{hit.line}: {hit.words}")
    print(f"{'kind':<12}{'words':>9}{'mannered':>10}{'per 10,000':>12}")
    for kind in KINDS:
        print(f"{kind:<12}{num_words[kind]:>9,}{len(found[kind]):>10}{rate(found[kind], num_words[kind]):>12.1f}")
    above = [kind for kind in options.check if rate(found[kind], num_words[kind]) > LIMIT]
    if above:
        limit = f"more than {LIMIT:g} mannered words per 10,000 in {', '.join(above)}"
        print(f"{limit}: python scripts/plain_words.py --list --check {' '.join(above)}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
