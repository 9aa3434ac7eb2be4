"""Writes docs/reference/config.md out of the schema and the backends' rules: what is documented is what is checked.

`python docs/generate_config_reference.py` writes the page; with `--check` it writes nothing and fails where the page is
out of step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from sparsebit.backends import BACKENDS, NumberRules
from sparsebit.config.fields import Allowed, Names, describe, section_of, walk
from sparsebit.config.rules import quantizers_for, schemes
from sparsebit.config.schema import QuantConfig
from sparsebit.config.section import Section
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.registry import ALGORITHMS, OBSERVERS

PAGE = Path(__file__).resolve().parent / "reference" / "config.md"

TEMPLATE = """\
<!-- Written by docs/generate_config_reference.py; edit that file or the schema, not this page. -->

# Config

A config is a YAML file with upper-case keys, read by `parse_qconfig(path | dict | YAML text)`. This one is complete:

```yaml
BACKEND: onnxruntime
W: {{QUANTIZER: {{BIT: 8}}}}
A: {{QUANTIZER: {{BIT: 8}}, OBSERVER: {{TYPE: mse}}}}
```

It is checked as a whole when it is read, and every fault is reported at once, with line, key path, given value,
allowed values and the nearest right key: an unknown key, a key given twice, a wrong type, a value outside its set, a
rule of the backend broken. A config that was read is frozen; `config.replace("W.QUANTIZER.BIT", 4)` returns a changed
and checked copy.

Only `W.QUANTIZER.BIT` and `A.QUANTIZER.BIT` are required, each unless its `DISABLE` is true. Names of backends,
quantizers, observers, schemes, layouts and distributions may be written in any case, `lsq+` also as `lsq_plus`.

{keys}

## ALGORITHMS: what is done after calibration

Each entry is a name, or a name with its options. They run in the order written, on the calibration data:

```yaml
W: {{QUANTIZER: {{BIT: 4}}}}
A: {{QUANTIZER: {{BIT: 8}}}}
ALGORITHMS: [gptq, {{bias_correction: {{METHOD: empirical}}}}]
```

{algorithms}

`register_algorithm` adds your own: see [Add a block algorithm](../guides/add-a-block-algorithm.md).

## Different layers, different wishes

`W.SPECIFIC` and `A.SPECIFIC` are lists of overrides: a glob of layer names, then the keys that differ there and their
values, in turn. Keys start below `W` or `A`.

```yaml
W:
  QUANTIZER: {{BIT: 4}}
  SPECIFIC:
    - {{"layer1.*": [QUANTIZER.BIT, 8]}}
    - {{"fc": [QUANTIZER.BIT, 8, OBSERVER.TYPE, mse]}}
A:
  QUANTIZER: {{BIT: 8}}
  SPECIFIC:
    - {{"*norm*": [QUANTIZER.DISABLE, true], "*softmax*": [QUANTIZER.DISABLE, true]}}
```

- The first glob that matches a layer wins, with all of its settings and no others: put the special before the general.
  A glob that never wins is a warning. `sparsebit config check FILE -m MODEL` shows which glob won for each layer.
- `*` matches any text, dots included, `?` for one character, `[ab]` for one of several; upper and lower case differ.
  A glob that starts with `*` must stand in quotes.
- A layer answers to its module path (`patch_embed.proj`) and to the same with underscores (`patch_embed_proj`). A
  function is named by the module that calls it and the op: `blocks.0.attn.softmax`; in the model's forward `softmax`.
- Every override obeys the rules of the backend, also where one of `W` and one of `A` meet in one layer.
- A glob that matches no layer is a warning that lists near names.

## Defaults per backend

Some defaults are the backend's. The first rows are what a key has where your config does not write it; the last is what
a backend's name alone means as a config (`parse_qconfig("onnxruntime")`, `-c onnxruntime`). `NAME-weights-only` is the
same with `A.QUANTIZER.DISABLE: true`: it needs no calibration data. `weights-only` is short for
`onnxruntime-weights-only`.

{defaults}

## What the backends run

{backends}

Weights are *weight-only* where the activations of their layer stay float (`A.QUANTIZER.DISABLE: true`, for all layers
or by `SPECIFIC`). *fp8* is `W.QUANTIZER: {{TYPE: fp8, BIT: 8}}`, 8-bit floats (e4m3fn) for weights alone: per tensor or
per channel, symmetric, with an observer that weighs no even steps (`minmax`, `moving_average`, `percentile`).
Activations are never per-group. Groups of weights
have 4 bits with `tensorrt`, and are whole with `tensorrt` and `openvino` (`GROUP_SIZE` divides a layer's inputs, or
holds them all); that is checked when the model is built. With `SCHEDULE.BN_TUNING: true` or
`ALGORITHMS: [batchnorm_tuning]` weights must be per-channel,
and batch norms are not folded until the tuning has ended, whatever `SCHEDULE.FUSE_BN` says.
"""


def render() -> str:
    """The whole page."""
    tables = {
        "algorithms": _table(_algorithm_rows()),
        "backends": _table(_backend_rows()),
        "defaults": _table(_default_rows()),
    }
    return TEMPLATE.format(keys="\n\n".join(_key_tables()), **tables)


def _key_tables() -> Iterator[str]:
    top = {name: field for name, field in QuantConfig.model_fields.items() if not section_of(field)}
    yield _key_table("## General", (((name,), field) for name, field in top.items()))
    for name, field in QuantConfig.model_fields.items():
        if model := section_of(field):
            keys = ((path, inner) for path, inner in walk(model, (name,)) if not section_of(inner))
            yield _key_table(f"## {name}: {(field.description or '').rstrip('.').lower()}", keys)


def _key_table(heading: str, keys: Iterable[tuple[Names, FieldInfo]]) -> str:
    rows = [
        (f"`{'.'.join(path)}`", _takes(path, field), _default(field), field.description or "") for path, field in keys
    ]
    return f"{heading}\n\n{_table([('key', 'takes', 'default', 'meaning'), *rows])}"


def _takes(path: Names, field: FieldInfo) -> str:
    if path[1:] == ("QUANTIZER", "TYPE"):
        return ", ".join(quantizers_for("W" if path[0] == "W" else "A"))
    return ", ".join(OBSERVERS) if path[1:] == ("OBSERVER", "TYPE") else describe(field)


def _algorithm_rows() -> Iterator[tuple[str, ...]]:
    yield "algorithm", "option", "takes", "default", "meaning"
    for name in ALGORITHMS:
        options = ALGORITHMS.options_of(name)[1] or Section
        for number, (key, field) in enumerate(options.model_fields.items()):
            shown = "" if number else f"`{name}`"
            yield shown, f"`{key}`", describe(field), _default(field), field.description or ""
        if not options.model_fields:
            yield f"`{name}`", "", "", "", "takes no options"


def _default(field: FieldInfo) -> str:
    if field.default_factory:
        return inspect.getdoc(field.default_factory) or ""
    if field.default == 0 and field.annotation is int and any(isinstance(mark, Allowed) for mark in field.metadata):
        return "required"  # `Bits`: 0 is "not given"
    plain = {True: "true", False: "false", (): "[]"} if isinstance(field.default, (bool, tuple)) else {}
    return f"`{plain.get(field.default, field.default)}`"


def _backend_rows() -> Iterator[tuple[str, ...]]:
    yield "backend", "tensors", "bits", "QSCHEME"
    for backend in BACKENDS.values():
        kinds = {"weights": backend.weight, "weight-only": backend.weight_only, "activations": backend.activation}
        for noun, rules in kinds.items():
            allowed = [scheme for scheme in schemes(rules) if noun != "activations" or "group" not in scheme]
            yield f"`{backend.name}`", noun, _bits(rules), ", ".join(allowed)


def _default_rows() -> Iterator[tuple[str, ...]]:
    profiles = [PROFILES[name] for name in BACKENDS]
    yield "key", *(f"`{profile.name}`" for profile in profiles)
    yield "`A.QSCHEME`", *(f"`{_activation_scheme(profile.name)}`" for profile in profiles)
    yield "`SCHEDULE.FUSE_BN`", *(f"`{str(profile.folds_batchnorm).lower()}`" for profile in profiles)
    adds = ("`false`" if profile.inputs is None else "adds that a convolution feeds" for profile in profiles)
    yield "`A.QADD.ENABLE_QUANT`", *adds
    bits = ((config.W.QUANTIZER.BIT, config.A.QUANTIZER.BIT) for config in map(parse_qconfig, BACKENDS))
    yield "the name alone", *(f"W{weight} A{activation}, batch norms folded" for weight, activation in bits)


def _activation_scheme(backend: str) -> str:
    bits = {"QUANTIZER": {"BIT": 8}}
    return parse_qconfig({"BACKEND": backend, "W": bits, "A": bits}).A.QSCHEME


def _bits(rules: NumberRules) -> str:
    bits = sorted(rules.bits)
    words = f"{bits[0]} to {bits[-1]}" if len(bits) > 2 else " or ".join(map(str, bits))
    return f"{words}, fp8" if "float8" in rules.formats else words


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * (lines[0].count(" | ") + 1) + "|", *lines[1:]])


def main(arguments: list[str]) -> int:
    page = render()
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        sys.stderr.write(f"{PAGE} is out of step with the schema: run python {Path(__file__).name}\n")
        return 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
