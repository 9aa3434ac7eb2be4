"""A packed model and a task that its adapters can learn: repeat a letter."""

from __future__ import annotations

import json
from pathlib import Path

from sparsebit.llm import Recipe, Tuning, quantize
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer

TUNING = Tuning(
    rank=4, length=24, batch_size=4, micro_batch_size=2, num_epochs=2, learning_rate=5e-3, dropout=0.1, warmup=0.1
)


def packed_model(folder: Path, bits: int = 4, kind: str = "llama", **changes: object) -> Path:
    source = with_tokenizer(saved(tiny_model(kind, **{"num_hidden_layers": 1, **changes}), folder / f"float-{kind}"))
    recipe = Recipe(method="rtn", scale_search="none", group_size=32, bits=bits)
    return quantize(source, folder / f"packed-{kind}-{bits}", recipe, check=False).folder


def instructions(folder: Path, num_samples: int = 16) -> Path:
    path = folder / "data.jsonl"
    rows = [{"prompt": f"say {chr(97 + n)}:", "response": chr(97 + n) * 4} for n in range(num_samples)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
