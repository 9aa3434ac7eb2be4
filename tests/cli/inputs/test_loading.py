"""Models and weights by name, and the message where there is none."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsebit.cli.inputs.loading import LoadingError, fill, load_model, read_weights
from sparsebit.cli.options import Arguments


@pytest.mark.usefixtures("project")
class TestModel:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("import sys; sys.exit(0)", r"importing odd failed: it called sys.exit\(0\) \(odd.py:1\)"),
            ("def f(:", r"importing odd failed: SyntaxError: "),
            ("raise RuntimeError('first\\nsecond')", r"importing odd failed: RuntimeError: first \(odd.py:1\)"),
            ("raise ValueError", r"importing odd failed: ValueError: no message"),
            ("import sys\ndef Net(): sys.exit()", r"--model odd:Net failed: it called sys.exit\(\) \(odd.py:2\)"),
            ("def Net(): raise KeyError('k')", r"--model odd:Net failed: KeyError: 'k' \(odd.py:1\)"),
            ("def __getattr__(name): raise OSError('none')", "reading Net failed: OSError: none"),
            ("def Net(): return None", "returns a NoneType, not an nn.Module"),
            ("Net = 'text'", "is a str; name a function"),
        ],
    )
    def test_code_that_fails(self, project: Path, source: str, message: str) -> None:
        (project / "odd.py").write_text(source)
        try:
            with pytest.raises(LoadingError, match=message):
                load_model("odd:Net")
        finally:
            sys.modules.pop("odd", None)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("dir/Model.ONNX", "--model .*no such file"),
            ("resnet.pt", "is a file of weights; give --weights resnet.pt"),
            ("resnet.safetensors", "is a file of weights"),
        ],
    )
    def test_a_file_instead_of_a_model(self, name: str, message: str) -> None:
        with pytest.raises(LoadingError, match=message):
            load_model(name)

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
            ("own_project:batches", "returns a generator, not an nn.Module"),
            ("own_project:broken", r"ValueError: no such checkpoint \(own_project.py:\d+\)"),
            ("own_project:needy", "'width'.*; --model-args sets arguments"),
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
    def test_whatever_the_file_holds(self, tmp_path: Path) -> None:
        """Text, noise, and files of torch.save with some bytes changed or cut off."""
        draw, file = random.Random(0), tmp_path / "net.pt"
        torch.save(nn.Linear(3, 2).state_dict(), file)
        whole = file.read_bytes()
        torch.save(nn.Linear(3, 2).state_dict(), file, _use_new_zipfile_serialization=False)
        legacy = file.read_bytes()
        contents = [b"hello\n", b"", b"\x80", b"PK", b"\x80\x02}", b"0" * 100, pickle.dumps([1, 2]), pickle.dumps(3)]
        contents += [bytes(draw.randrange(256) for _ in range(50)) for _ in range(20)]
        for data in (whole, legacy):
            contents += [data[: draw.randrange(len(data))] for _ in range(20)]
            for _ in range(60):
                changed = bytearray(data)
                changed[draw.randrange(min(len(data), 700))] = draw.randrange(256)
                contents.append(bytes(changed))
        for content in contents:
            file.write_bytes(content)
            with contextlib.suppress(LoadingError):
                fill(nn.Linear(3, 2), read_weights(file), file)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"hello", r"not a file of torch.save \(it starts with b'he'\)"),
            (b"PK\x03\x04 and no more", "not a whole file of torch.save"),
            (pickle.dumps([1, 2]), "holds a list|holds Python objects"),
        ],
        ids=["text", "zip", "pickle"],
    )
    def test_other_files(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "net.pt").write_bytes(content)
        with pytest.raises(LoadingError, match=message):
            read_weights(tmp_path / "net.pt")

    def test_torchscript(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated; such files are about
            torch.jit.save(torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3)), tmp_path / "net.pt")
        with pytest.raises(LoadingError, match="is a TorchScript archive"):
            read_weights(tmp_path / "net.pt")

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
        with pytest.raises(LoadingError, match="give a state_dict"):
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
