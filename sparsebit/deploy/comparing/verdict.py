"""`verdict`: an audit in one or two plain sentences."""

from __future__ import annotations

from collections import Counter

from sparsebit.records.audit import Audit, LayerRun

EVEN = 0.03  # ratios of times that are this near to 1 are the machine's noise
_KNOWN = ("integer", "weight-only")


def verdict(audit: Audit) -> str:
    """`slower than float (1.16 of its time): 9 of 20 convolutions are not in integers, because …; …`."""
    speed, parts = _speed(audit), [_layers(audit), *_on_purpose(audit), *_conversions(audit)]
    could_be_faster = audit.ratio is not None and audit.ratio < 1 - EVEN and _floats(audit)
    text = f"{speed}{', but' if could_be_faster else ':'} {parts[0]}" if speed else parts[0]
    return ". ".join([text[0].upper() + text[1:], *(part[0].upper() + part[1:] for part in parts[1:])])


def _speed(audit: Audit) -> str:
    ratio = audit.ratio
    if ratio is None:
        return ""
    speed = "faster than" if ratio < 1 - EVEN else "slower than" if ratio > 1 + EVEN else "as fast as"
    return f"{speed} float ({ratio:.2f} of its time)"


def _layers(audit: Audit) -> str:
    heavy = tuple(layer for layer in audit.heavy if not layer.on_purpose)
    floats = _floats(audit)
    if not heavy:
        return "no layer runs in integers" if audit.heavy else "the file has no convolution and no matrix product"
    if not floats:
        return f"all {_counted(heavy)} {_run(heavy)}" if len(heavy) > 1 else f"its one {heavy[0].kind} {_run(heavy)}"
    if len(floats) == len(heavy) and all(layer.cause == "it is not quantized" for layer in floats):
        return f"nothing is quantized of {_counted(heavy)}"
    cause, number = Counter(layer.cause for layer in floats).most_common(1)[0]
    main = [layer for layer in floats if layer.cause == cause]
    share = "" if number == len(floats) else f"{number} of them "
    remedy = next((layer.remedy for layer in main if layer.remedy), "")
    shares = " and ".join(
        f"{count} of {_counted([layer for layer in heavy if layer.kind == kind])}"
        for kind, count in Counter(layer.kind for layer in floats).most_common()
    )
    verb = "is" if len(floats) == 1 else "are"
    because = cause if number == 1 else _of_several(cause)
    return f"{shares} {verb} not in integers, {share}because {because}" + (f"; {remedy}" if remedy else "")


def _on_purpose(audit: Audit) -> list[str]:
    """`4 matrix products stay in float by design`, `1 linear layer was switched off by the config`."""
    groups: dict[bool, list[LayerRun]] = {}
    for layer in audit.heavy:
        if layer.on_purpose:
            groups.setdefault(layer.cause.endswith("by design"), []).append(layer)
    words = {
        True: ("stay in float by design", "stays in float by design"),
        False: ("were switched off by the config", "was switched off by the config"),
    }
    return [f"{_counted(layers)} {words[is_design][len(layers) == 1]}" for is_design, layers in groups.items()]


def _of_several(cause: str) -> str:
    """`its output is read by a float add` -> `their output …`."""
    for one, several in (("it is ", "they are "), ("it was ", "they were "), ("it adds ", "they add ")):
        if cause.startswith(one):
            return several + cause.removeprefix(one)
    words = {"its": "their", "it": "them"}
    return " ".join(words.get(word, word) for word in cause.split())


def _floats(audit: Audit) -> list[LayerRun]:
    return [layer for layer in audit.heavy if layer.arithmetic not in _KNOWN and not layer.on_purpose]


def _run(layers: tuple[LayerRun, ...]) -> str:
    """Describes layers without any float one."""
    kinds = {layer.arithmetic for layer in layers}
    words = {"integer": "in integers", "weight-only": "on low-bit weights and float activations"}
    return f"run{'' if layers[1:] else 's'} {'on low-bit numbers' if len(kinds) > 1 else words[kinds.pop()]}"


def _conversions(audit: Audit) -> list[str]:
    """The remaining conversions between layers, if all heavy layers are in integers and the model is still slow."""
    if audit.ratio is None or audit.ratio < 1 - EVEN or _floats(audit):
        return []
    lights = [layer for layer in audit.layers if not layer.heavy and layer.arithmetic == "float"]
    number = sum(audit.leftovers.values())
    if not lights or not number:
        return []
    names = ", ".join(f"{count} {op}" for op, count in Counter(layer.op for layer in lights).most_common(3))
    return [f"the cost is between them: {number} conversions around layers in float ({names})"]


def _counted(layers: tuple[LayerRun, ...] | list[LayerRun]) -> str:
    """`20 convolutions and 1 linear layer`."""
    counts = Counter(layer.kind for layer in layers)
    plural = {kind: kind if count == 1 or kind.endswith("s") else f"{kind}s" for kind, count in counts.items()}
    return " and ".join(f"{count} {plural[kind]}" for kind, count in counts.most_common())
