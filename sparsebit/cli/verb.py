"""`Verb`: a command whose `--help` reads well at 80 columns."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from typer.core import TyperCommand

_WIDTH = 76  # of an example: typer indents by one, and a terminal has 80 columns


class Verb(TyperCommand):
    """Prose flows with the terminal, examples are lines for a shell, and flags have no type."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = self.help and flowing(self.help)
        for parameter in self.params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.metavar is None and getattr(parameter, "min", None) is not None:
                parameter.metavar = "N"

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


def flowing(text: str) -> str:
    r"""Paragraphs as one line each, to be wrapped at any width; those that are commands broken as a shell reads them.

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
