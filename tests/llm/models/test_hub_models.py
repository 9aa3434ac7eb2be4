"""Models by their name on the hub: local folders win, the cache is used offline, and commits are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm import Recipe, quantize
from sparsebit.llm.models.hub_models import HubSource, hub_source, local_folder
from tests.llm.tiny_models import saved, tiny_model

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEAREST = Recipe("rtn", group_size=32, scale_search="none")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, offline, and a working folder without models."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def put(cache: Path, model: Path, name: str = "org/tiny-model") -> Path:
    """The model in the cache as the hub lays it out: blobs, and links to them in the folder of a commit."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_the_cache_is_used_offline_and_the_commit_is_kept(cache: Path, tmp_path: Path) -> None:
    put(cache, saved(tiny_model(), tmp_path / "model"))
    made = quantize("org/tiny-model", tmp_path / "packed", NEAREST, check=False)
    assert made.source == HubSource("org/tiny-model", COMMIT)
    assert json.loads((made.folder / "source.json").read_text()) == {"name": "org/tiny-model", "revision": COMMIT}
    assert not any(path.is_symlink() for path in made.folder.iterdir())
    assert quantize(tmp_path / "model", tmp_path / "other", NEAREST, check=False).source is None


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_revisions_of_the_cache(cache: Path, tmp_path: Path, revision: str | None) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    snapshot = put(cache, tmp_path / "model")
    assert local_folder("org/tiny-model", revision) == snapshot
    with pytest.raises(ConfigError, match=r"at revision v2 .*cannot be reached .*--revision v2 --local-dir"):
        local_folder("org/tiny-model", "v2")


@pytest.mark.usefixtures("cache")
def test_offline_the_message_names_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*hf download org/name --local-dir DIR"):
        local_folder("org/name")


@pytest.mark.usefixtures("cache")
def test_a_folder_wins_over_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", _not_reached)
    Path("org/name").mkdir(parents=True)
    assert local_folder("org/name") == Path("org/name")
    with pytest.raises(ConfigError, match="only models of the hub have revisions"):
        local_folder("org/name", "main")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("models/lama", r"is not a folder, and models is one \(did you mean models/llama\?\)"),
        ("./other/llama", "is not a folder; give"),
        ("/nowhere/llama", "is not a folder; give"),
        ("~/llama", "is not a folder; give"),
        ("modls", r"is not a folder \(did you mean models\?\)"),
        ("a/b/c", "is not a folder; give"),
        ("org/name/", "is not a folder; give"),
        ("org/model.safetensors", "is not a folder; give"),
    ],
)
def test_a_mistyped_path_does_not_ask_the_hub(given: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", _not_reached)
    Path("models/llama").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=message):
        local_folder(given)


def test_a_download_leaves_pickles_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **how: Any) -> str:
        asked.update(how, name=name)
        return str(cache / "models--org--name" / "snapshots" / COMMIT)

    monkeypatch.setattr(hub, "snapshot_download", download)
    found = local_folder("org/name", "v1")
    assert hub_source(found) == HubSource("org/name", COMMIT)
    assert asked["name"] == "org/name" and asked["revision"] == "v1"
    assert "*.safetensors" in asked["allow_patterns"] and not any("bin" in wanted for wanted in asked["allow_patterns"])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "neither a folder here nor a model of the hub"),
        ("GatedRepoError", "accept conditions"),
        ("RevisionNotFoundError", "no such branch, tag or commit"),
    ],
)
def test_what_the_hub_answers(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(errors, error)
    monkeypatch.setattr(hub, "snapshot_download", _raising(lambda: kind.__new__(kind)))
    with pytest.raises(ConfigError, match=message):
        local_folder("org/name", "v1")


@pytest.mark.usefixtures("cache")
def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "snapshot_download", _raising(lambda: ConnectionError("no route")))
    with pytest.raises(ConfigError, match=r"cannot be reached \(ConnectionError: no route\)"):
        local_folder("org/name")


def _raising(make: Callable[[], Exception]) -> Callable[..., None]:
    def run(*_: Any, **__: Any) -> None:
        raise make()

    return run


def _not_reached(*_: Any, **__: Any) -> None:
    raise AssertionError("the hub was asked")
