"""`Verb`: a command whose `--help` fits 80 columns, and that accepts lists of numbers in either spelling."""

from __future__ import annotations

import difflib
import re
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand

_LIST = "N,N,..."  # the metavar of options that take whole numbers
_SIMILAR = 0.75  # similarity of a suggested name; below, names are unrelated
_CONFIG = "is a key of the config: give a file to --config (sparsebit config check BACKEND --full prints one)"
_HINTS = {
    "bit": f"W.QUANTIZER.BIT {_CONFIG}",
    "bits": f"W.QUANTIZER.BIT {_CONFIG}",
    "backend": "--config takes the name of a backend",
    "calibration": "--data names the calibration data",
    "calibration-data": "--data names the calibration data",
    "checkpoint": "--weights names the file of weights",
    "labels": "labels are part of the data; --test-data names labelled data",
    "state-dict": "--weights names the file of weights",
}
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or the one of the copy of click in newer versions of typer
_WIDTH = 76  # of an example: typer indents by one, and a terminal has 80 columns


class Verb(TyperCommand):
    """Help in which prose is wrapped to the terminal, examples stay shell commands, and flags have no type."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = self.help and flowing(self.help)
        parameters: list[Any] = self.params
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.metavar is None and getattr(parameter, "min", None) is not None:
                parameter.metavar = "N"
            parameter._get_number_range_help_str = str  # otherwise `[x>=1]` replaces the description

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for one in self.params if one.metavar == _LIST for name in one.opts}
        try:
            return super().parse_args(ctx, joined(args, lists))
        except _UsageError as error:
            if hasattr(error, "possibilities"):
                known = [name for one in self.params for name in one.opts]
                error.possibilities = difflib.get_close_matches(error.option_name, known, cutoff=_SIMILAR)
                hint = _HINTS.get(error.option_name.lstrip("-").replace("_", "-"), "")
                if not error.possibilities and hint and hint.partition(" ")[0] in ("labels", "W.QUANTIZER.BIT", *known):
                    error.message = f"{error.message}; {hint}"
            raise

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


def joined(args: list[str], lists: set[str]) -> list[str]:
    """Joins the whole numbers after options that take lists into one word.

    >>> joined(["m", "--candidate-bits", "2", "3", "4", "--quiet"], {"--candidate-bits"})
    ['m', '--candidate-bits', '2,3,4', '--quiet']
    """
    found: list[str] = []
    for word in args:
        if word.isdecimal() and len(found) > 1 and found[-2] in lists:
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def flowing(text: str) -> str:
    r"""Each paragraph as one line, to be wrapped at any width; commands are wrapped as shell commands.

    >>> print(flowing("One\ntwo.\n\nsparsebit demo\n--bits 8"))
    One two.
    <BLANKLINE>
    sparsebit demo --bits 8
    """
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(_command(text) if text.startswith("sparsebit ") else text for text in paragraphs)


def _command(text: str) -> str:
    together = re.sub(r"( --?[a-z]\S*) (?!-)", "\\1\0", text)  # an option and its value
    options: dict[str, Any] = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return " \\\n".join(textwrap.wrap(together, _WIDTH - 2, **options)).replace("\0", " ")
