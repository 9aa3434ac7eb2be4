"""A run as a fragment of HTML for notebooks: the numbers at the top and the ladder, without a script."""

from __future__ import annotations

from html import escape

from sparsebit.report.page_data import Card, Run, Step

# Notebooks have their own colours: only spaces and sizes are set, and lines take the colour of the text.
_CARD = "display:inline-block;vertical-align:top;margin:0 24px 12px 0"
_CELL = "text-align:left;padding:2px 12px 2px 0"


def fragment(run: Run) -> str:
    """The HTML for `_repr_html_`."""
    state = "" if run.met is None else ", goal met" if run.met else ", goal not met"
    parts = [f"<p><b>{_text(run.name)}</b>: {_text(run.kind + state)}</p>"]
    parts += [f"<p>{_text(text)}</p>" for text in (run.reason,) if text]
    parts.append("".join(map(_card, run.cards)))
    if run.steps:
        heads = "".join(f'<th style="{_CELL}">{name}</th>' for name in ("", "step", "result", "loss", "time", "bytes"))
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row, run.steps))}</tbody></table>")
    return f"<div>{''.join(parts)}</div>"


def _card(card: Card) -> str:
    share = "" if card.share is None else f"{100 * card.share:.3g} %"
    below = ", ".join(filter(None, (card.before and f"{card.before} before", share)))
    big = f'<div style="font-size:150%;font-weight:600">{_text(card.value)}</div>'
    return f'<div style="{_CARD}"><div>{_text(card.label)}</div>{big}<div>{_text(below)}</div></div>'


def _row(step: Step) -> str:
    loss = "" if step.loss is None else f"{step.loss:.2f}" + ("" if step.bound is None else f" ± {step.bound:.2f}")
    shares = ["" if share is None else f"{share:.3f}" for share in (step.latency, step.bytes)]
    cells = ("★" if step.is_best else "", step.name, step.verdict, loss, *shares)
    shown = "".join(f'<td style="{_CELL}">{_text(cell)}</td>' for cell in cells)
    return f"<tr>{shown}</tr>"


def _text(text: str) -> str:
    return escape(text.encode("utf-8", "replace").decode())
