"""A disk that is full while a result is written: told in words, nothing half-written is left, the same call goes on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm import Recipe, convert, quantize
from tests.llm.tiny_models import saved, tiny_model, with_bpe

resource = pytest.importorskip("resource")
pytest.importorskip("compressed_tensors")
FAST = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Inside, a file of this process cannot become larger: writing fails as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def model(folder: Path) -> Path:
    tiny = tiny_model(num_hidden_layers=2, vocab_size=264, bos_token_id=257, eos_token_id=258)
    return with_bpe(saved(tiny, folder))


def test_quantizing(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    with files_up_to(12_000), pytest.raises(CheckpointError, match=r"00000\.safetensors cannot be written"):
        quantize(source, tmp_path / "packed", FAST, check=False)
    assert not (tmp_path / "packed").exists()
    # Blocks have 23 KB, the embeddings, which are written behind the last block, 68 KB.
    with files_up_to(50_000), pytest.raises(OSError, match=r"model-00001-of-00003\.safetensors cannot be written"):
        quantize(source, tmp_path / "packed", FAST, check=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model", "packed.partial"}
    assert quantize(source, tmp_path / "packed", FAST, check=False).num_resumed == 2


def test_converting(tmp_path: Path) -> None:
    packed = quantize(model(tmp_path / "model"), tmp_path / "packed", FAST, check=False).folder
    with files_up_to(12_000), pytest.raises(OSError, match=r"safetensors cannot be written"):
        convert(packed, tmp_path / "gptq", "gptq", check=False)
    pytest.importorskip("gguf")
    with files_up_to(50_000), pytest.raises(OSError, match=r"file\.gguf cannot be written"):
        convert(packed, tmp_path / "file.gguf", "gguf", check=False)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "packed"}


def test_an_output_that_is_a_link_to_nothing_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    source, target = model(tmp_path / "model"), tmp_path / "packed"
    target.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="packed exists"):
        quantize(source, target, FAST, check=False)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "packed"}
