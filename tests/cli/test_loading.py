"""Models and weights by name, and the message where there is none."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsebit.cli.loading import LoadingError, fill, load_model, read_weights
from sparsebit.cli.options import Arguments


@pytest.mark.usefixtures("project")
class TestModel:
    @pytest.mark.parametrize("name", ["Net", "net", "net.body"])
    def test_class_instance_or_dotted(self, name: str) -> None:
        model = load_model(f"own_project:{name}")
        assert isinstance(model, nn.Module) and not model.training

    def test_arguments(self) -> None:
        assert load_model("own_project:Net", Arguments((3,))).head.out_features == 3
        assert load_model("own_project:Net", Arguments((), {"classes": 4})).head.out_features == 4

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("own_project", "write MODULE:NAME"),
            ("own_project:", "write MODULE:NAME"),
            ("./own_project.py:Net", "as Python imports it: own_project:Net"),
            ("other_project:Net", "there is no module 'other_project'"),
            ("own_project.deep:Net", "there is no module 'own_project.deep'"),
            ("own_project:Nett", "own_project has no 'Nett'; did you mean Net"),
            ("own_project:number", "is a int; name a function or class"),
            ("own_project:batches", "gives a generator, not an nn.Module"),
            ("own_project:broken", r"ValueError: no such checkpoint \(own_project.py:\d+\)"),
            ("own_project:needy", "'width'.*; --model-args gives arguments"),
        ],
    )
    def test_message(self, name: str, message: str) -> None:
        with pytest.raises(LoadingError, match=message):
            load_model(name)

    def test_arguments_for_what_takes_none(self) -> None:
        with pytest.raises(LoadingError, match="is a model already"):
            load_model("own_project:net", Arguments((3,)))

    def test_module_that_fails_to_import(self, project: Path) -> None:
        (project / "lame.py").write_text("import a_package_that_is_not_installed\n")
        with pytest.raises(LoadingError, match=r"importing lame failed: ModuleNotFoundError: .*\(lame.py:1\)"):
            load_model("lame:Net")


class TestReadWeights:
    @pytest.fixture
    def state(self) -> dict[str, Tensor]:
        return nn.Linear(2, 3).state_dict()

    @pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
    def test_pt(self, tmp_path: Path, state: dict[str, Tensor], wrapper: str | None) -> None:
        torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "net.pt")
        assert read_weights(tmp_path / "net.pt").keys() == state.keys()

    def test_safetensors(self, tmp_path: Path, state: dict[str, Tensor]) -> None:
        save_file(state, tmp_path / "net.safetensors")
        assert torch.equal(read_weights(tmp_path / "net.safetensors")["weight"], state["weight"])

    def test_pickled_objects_are_never_opened(self, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return os.mkdir, (str(tmp_path / "sprung"),)

        with (tmp_path / "net.pt").open("wb") as file:
            pickle.dump({"state_dict": Trap()}, file, protocol=2)
        torch.save(nn.Linear(2, 3), tmp_path / "whole.pt")
        for name in ("net.pt", "whole.pt"):
            with pytest.raises(LoadingError, match="holds Python objects"):
                read_weights(tmp_path / name)
        assert not (tmp_path / "sprung").exists()

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("net.onnx", b"", r"unknown kind; allowed: \.safetensors, \.pt"),
            ("net.safetensors", b"half a fi", "not a whole safetensors file"),
            ("net.pt", b"", "not a file of torch.save"),
        ],
    )
    def test_message(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LoadingError, match=message):
            read_weights(tmp_path / name)

    def test_no_file(self) -> None:
        with pytest.raises(LoadingError, match="there is no such file"):
            read_weights(Path("nowhere.pt"))

    @pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}], ids=["list", "no tensors", "empty"])
    def test_no_state_dict(self, tmp_path: Path, content: object) -> None:
        torch.save(content, tmp_path / "net.pt")
        with pytest.raises(LoadingError, match="wanted is a state_dict"):
            read_weights(tmp_path / "net.pt")


class TestFill:
    FILE = Path("net.pt")

    def test_fills(self) -> None:
        model, other = nn.Linear(2, 3), nn.Linear(2, 3)
        fill(model, other.state_dict(), self.FILE)
        assert torch.equal(model.weight, other.weight)

    def test_from_data_parallel(self) -> None:
        model, other = nn.Linear(2, 3), nn.Linear(2, 3)
        fill(model, {f"module.{name}": tensor for name, tensor in other.state_dict().items()}, self.FILE)
        assert torch.equal(model.weight, other.weight)

    def test_tied_weights_are_needed_once(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        fill(model, {"0.weight": torch.eye(3)}, self.FILE)
        assert torch.equal(model[1].weight, torch.eye(3))

    def test_batch_counters_may_be_missing(self) -> None:
        model = nn.BatchNorm1d(3)
        fill(model, {name: t for name, t in model.state_dict().items() if "num_batches" not in name}, self.FILE)

    def test_mismatch_lists_everything(self) -> None:
        with pytest.raises(LoadingError) as caught:
            fill(nn.Linear(2, 3), {"weight": torch.zeros(3, 4), "gain": torch.zeros(3)}, self.FILE)
        assert str(caught.value).splitlines() == [
            "--weights net.pt does not fit Linear:",
            "  1 missing: bias",
            "  1 unexpected: gain",
            "  1 of another shape: weight (3, 4) (model: (3, 2))",
        ]

    def test_long_lists_are_cut(self) -> None:
        with pytest.raises(LoadingError, match=r"12 unexpected: .*x9 and 2 more"):
            fill(nn.ReLU(), {f"x{i}": torch.zeros(1) for i in range(12)}, self.FILE)
