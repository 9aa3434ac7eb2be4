"""`gguf_perplexity`: the perplexity of a GGUF file as llama.cpp computes it, by the package xllamacpp.

The binding does not return logits of a whole text. It returns hidden states: those after the last norm, for all tokens
of a window in one pass. The product with the output layer is computed here, in float32. One prediction is first
compared with that of llama.cpp, since some architectures change their logits further.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.gguf.file import gguf_package
from sparsebit.llm.models.calibration_text import read_documents, windows
from sparsebit.llm.models.hub_classes import package
from sparsebit.llm.running.perplexity import Perplexity, mean_perplexity
from sparsebit.progress import track

_PREFIXES = range(8, 40)  # numbers of tokens before the compared prediction
_NUM_COMPARED = 8
# Log probabilities differ by a few hundredths: llama.cpp rounds the inputs of the output layer to 8 bits.
_TOLERANCE = 0.3


@torch.no_grad()
def gguf_perplexity(path: Path, text: Path, length: int, num_windows: int | None = None) -> Perplexity:
    """As `sparsebit.llm.running.perplexity` counts it, on windows of the text; the tokenizer is that of the file."""
    weight, bias = _output_layer(path)
    with _server(path, max(_PREFIXES) + 2, is_embedding=False) as server:
        tokens = [_tokens(server, document) for document in read_documents(text)]
        found = windows(torch.cat(tokens), length, num_windows)
        expected = _prediction(server, found[0].tolist())
    with _server(path, length, is_embedding=True) as server:

        def logits(row: Tensor) -> Tensor:
            (answer,) = _post(server, "/embedding", {"content": row.tolist()})
            return F.linear(torch.tensor(answer["embedding"]), weight, bias)

        if expected is not None:
            _compare(logits(found[0, : expected[0]])[-1].log_softmax(-1), expected[1], path)
        total = 0.0
        for row in track(found, "perplexity"):
            total += float(F.cross_entropy(logits(row)[:-1], row[1:], reduction="none").double().sum())
    return mean_perplexity(total, found)


def _output_layer(path: Path) -> tuple[Tensor, Tensor | None]:
    """Its weight and bias, dequantized; the embeddings, if the file has no other."""
    gguf = gguf_package()
    try:
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        name = next(name for name in ("output.weight", "token_embd.weight") if name in tensors)
    except (OSError, ValueError, KeyError, IndexError, StopIteration) as error:
        problem = "it has no output layer" if isinstance(error, StopIteration) else error
        raise CheckpointError(f"{path} cannot be read as a GGUF file of a language model ({problem})") from error

    def values(name: str) -> Tensor:
        stored = tensors[name]
        return torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy()).float()

    return values(name), values("output.bias") if "output.bias" in tensors else None


@contextlib.contextmanager
def _server(path: Path, length: int, *, is_embedding: bool) -> Iterator[Any]:
    xllamacpp = package("xllamacpp", "", f"{path}: measuring a GGUF file")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = length
    parameters.n_parallel, parameters.warmup, parameters.verbosity = 1, False, 1
    parameters.cpuparams.n_threads = torch.get_num_threads()
    if is_embedding:
        parameters.embedding, parameters.embd_normalize = True, -1
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:
        raise DeploymentError(f"llama.cpp does not load {path} ({error})") from error
    yield server


def _post(server: Any, verb: str, body: dict[str, Any]) -> Any:
    address = f"{server.listening_address}{verb}"  # on this machine
    request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise DeploymentError(f"llama.cpp answers {verb} with {error.read().decode(errors='replace')}") from error


def _tokens(server: Any, text: str) -> Tensor:
    found = _post(server, "/tokenize", {"content": text, "add_special": True})["tokens"]
    return torch.tensor(found, dtype=torch.int64)


def _prediction(server: Any, tokens: list[int]) -> tuple[int, dict[int, float]] | None:
    """The length of a prefix and log probabilities of the likeliest next tokens; None for parts of letters."""
    for size in _PREFIXES:
        request = {"prompt": tokens[:size], "max_tokens": 1, "logprobs": _NUM_COMPARED, "temperature": 0}
        answer = server.handle_completions({**request, "cache_prompt": False})
        content = (answer.get("choices", [{}])[0].get("logprobs") or {}).get("content") or []
        if content and content[0].get("top_logprobs"):
            likeliest = {int(one["id"]): float(one["logprob"]) for one in content[0]["top_logprobs"]}
            return min(size, len(tokens)), likeliest
        if size >= len(tokens):
            break
    return None


def _compare(found: Tensor, expected: dict[int, float], path: Path) -> None:
    difference = max(abs(float(found[token]) - value) for token, value in expected.items())
    if not difference <= _TOLERANCE:
        raise DeploymentError(
            f"{path}: log probabilities of llama.cpp differ by {difference:.2g} from hidden states times the output "
            "layer: its architecture changes its logits further; measure the model folder instead"
        )
