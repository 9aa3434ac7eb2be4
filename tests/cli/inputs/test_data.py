"""Calibration data by name."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsebit.cli.inputs.data import Inputs, load_data, spread
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.option_groups import DataOptions
from sparsebit.cli.options import Names, Numbers, Size
from sparsebit.errors import MissingExtraError
from sparsebit.progress import known_length


class Pair(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query + key


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Anything(nn.Module):
    def forward(self, **tensors: Tensor) -> Tensor:
        return sum(tensors.values(), torch.zeros(()))


def batches(source: str | Path, model: nn.Module | None = None, **options: Any) -> list[Any]:
    data = load_data(str(source), DataOptions(**options), Inputs.of(model or nn.ReLU()))
    found = list(data.tracked("reading"))
    assert known_length(data) in (None, len(found))
    return found


def save_npz(file: Path, **arrays: Any) -> Path:
    numpy = pytest.importorskip("numpy")
    numpy.savez(file, **{name: array.numpy() for name, array in arrays.items()})
    return file


def save_tensors(file: Path, **arrays: Tensor) -> Path:
    save_file(arrays, file)
    return file


SAVERS = [pytest.param(save_npz, "x.npz", id="npz"), pytest.param(save_tensors, "x.safetensors", id="safetensors")]


class TestImageFolder:
    @pytest.fixture
    def photos(self, tmp_path: Path) -> Path:
        image = pytest.importorskip("PIL.Image")
        for index in range(10):
            file = tmp_path / f"class{index // 5}" / f"{index}.png"
            file.parent.mkdir(exist_ok=True)
            image.new("RGB", (6, 6), (index, 0, 0)).save(file)
        return tmp_path

    def test_a_few_that_cannot_be_read_are_left_out_and_told(self, photos: Path) -> None:
        (photos / "class1" / "7.png").write_text("no image")
        data = load_data(str(photos), DataOptions(size=Size(4, 4), batch_size=4), Inputs.of(nn.ReLU()))
        for _ in range(2):
            with pytest.warns(UserWarning, match=r"1 of 10 images cannot be read and are left out: .*7\.png: "):
                assert [len(batch) for batch in data] == [4, 4, 1]

    def test_many_are_an_error(self, photos: Path) -> None:
        for index in (1, 2):
            (photos / "class0" / f"{index}.png").write_text("no image")
        with pytest.raises(LoadingError, match=r"2 of 10 images cannot be read, .* 10%: .*1\.png: .*2\.png: "):
            batches(photos, size=Size(4, 4))

    def test_a_batch_that_fills_the_memory(self, photos: Path) -> None:
        with pytest.raises(LoadingError, match=r"a batch of 10 such images takes 32 GB; give a smaller --size or"):
            batches(photos, size=Size(16384, 16384))

    def test_batches(self, photos: Path) -> None:
        found = batches(photos, size=Size(4, 4), batch_size=4)
        assert [batch.shape for batch in found] == [(4, 3, 4, 4), (4, 3, 4, 4), (2, 3, 4, 4)]
        assert found[0].dtype == torch.float32

    def test_the_number_of_batches_is_known_before_they_are_read(self, photos: Path) -> None:
        assert (
            known_length(load_data(str(photos), DataOptions(size=Size(4, 4), batch_size=4), Inputs.of(nn.ReLU()))) == 3
        )

    def test_few_samples_come_from_every_class(self, photos: Path) -> None:
        (found,) = batches(photos, size=Size(4, 4), num_samples=4)
        assert (found[:, 0, 0, 0] * 255).round().tolist() == [0, 2, 5, 7]

    def test_normalised(self, photos: Path) -> None:
        (found,) = batches(photos, size=Size(4, 4), mean=Numbers([0.5]), std=Numbers([0.25]))
        assert found[:, 1:].unique().tolist() == [-2.0]

    def test_gray(self, photos: Path) -> None:
        assert batches(photos, size=Size(4, 4), gray=True)[0].shape == (10, 1, 4, 4)

    def test_size_is_needed(self, photos: Path) -> None:
        with pytest.raises(typer.BadParameter, match="--size"):
            batches(photos)


class TestArrays:
    @pytest.mark.parametrize(("save", "name"), SAVERS)
    def test_one_array_is_the_argument(self, tmp_path: Path, save: Any, name: str) -> None:
        x = torch.randn(10, 4)
        found = batches(save(tmp_path / name, images=x), batch_size=4)
        assert [len(batch) for batch in found] == [4, 4, 2] and torch.equal(torch.cat(found), x)

    @pytest.mark.parametrize(("save", "name"), SAVERS)
    def test_names_of_parameters_are_keywords(self, tmp_path: Path, save: Any, name: str) -> None:
        file = save(tmp_path / name, key=torch.ones(3, 4), query=torch.zeros(3, 4))
        (found,) = batches(file, Pair())
        assert set(found) == {"query", "key"} and found["key"].sum() == 12

    def test_any_keyword_where_forward_takes_any(self, tmp_path: Path) -> None:
        (found,) = batches(save_tensors(tmp_path / "x.safetensors", a=torch.ones(3), b=torch.ones(3)), Anything())
        assert set(found) == {"a", "b"}

    @pytest.mark.parametrize(("save", "name"), SAVERS)
    @pytest.mark.parametrize("labels", ["labels", "y", "Target"])
    def test_labels_are_left_out(self, tmp_path: Path, save: Any, name: str, labels: str) -> None:
        file = save(tmp_path / name, **{"images": torch.randn(5, 2), labels: torch.arange(5)})
        data = load_data(str(file), DataOptions(), Inputs.of(nn.ReLU()))
        assert [batch.shape for batch in data] == [(5, 2)] and f"(left out: {labels})" in data.description

    def test_labels_that_the_model_takes_stay(self, tmp_path: Path) -> None:
        class Loss(nn.Module):
            def forward(self, x: Tensor, labels: Tensor) -> Tensor:
                return x + labels

        (batch,) = batches(save_npz(tmp_path / "x.npz", x=torch.zeros(3), labels=torch.zeros(3)), Loss())
        assert batch.keys() == {"x", "labels"}

    @pytest.mark.parametrize(("save", "name"), SAVERS)
    def test_input_chooses(self, tmp_path: Path, save: Any, name: str) -> None:
        arrays = {
            "x_train": torch.zeros(6, 2),
            "x_test": torch.ones(3, 2),
            "y_test": torch.zeros(3),
            "other": torch.ones(3),
        }
        file = save(tmp_path / name, **arrays)
        with pytest.raises(LoadingError, match="--input NAME chooses"):
            batches(file)
        (batch,) = batches(file, arrays=Names(["x_test"]))
        assert torch.equal(batch, torch.ones(3, 2))
        with pytest.raises(LoadingError, match=r"--input x_val: .* holds .*x_train"):
            batches(file, arrays=Names(["x_val"]))

    def test_input_is_for_files_of_arrays(self, tmp_path: Path) -> None:
        with pytest.raises(typer.BadParameter, match="--input cannot be used with"):
            batches("own_project:batches", arrays=Names(["x"]))

    def test_unknown_name(self, tmp_path: Path) -> None:
        file = save_tensors(tmp_path / "x.safetensors", query=torch.zeros(3), other=torch.zeros(3))
        with pytest.raises(LoadingError, match=r"other is not one of the parameters of Pair.forward \(query, key\)"):
            batches(file, Pair())

    @pytest.mark.parametrize(("save", "name"), SAVERS)
    def test_bytes_are_images(self, tmp_path: Path, save: Any, name: str) -> None:
        pixels = torch.full((5, 8, 6, 3), 255, dtype=torch.uint8)
        (found,) = batches(save(tmp_path / name, x=pixels), mean=Numbers([0.5]), std=Numbers([0.5, 0.25, 1.0]))
        assert found.shape == (5, 3, 8, 6) and found[0, :, 0, 0].tolist() == [1.0, 2.0, 0.5]

    def test_floats_take_the_type_of_the_model_and_integers_stay(self, tmp_path: Path) -> None:
        assert batches(save_npz(tmp_path / "x.npz", x=torch.zeros(2, dtype=torch.float64)))[0].dtype == torch.float32
        assert batches(save_npz(tmp_path / "x.npz", images=torch.zeros(2)), Half())[0].dtype == torch.float16
        assert batches(save_npz(tmp_path / "x.npz", x=torch.zeros(2, dtype=torch.int64)))[0].dtype == torch.int64

    def test_numbers_of_another_byte_order(self, tmp_path: Path) -> None:
        numpy = pytest.importorskip("numpy")
        numpy.savez(tmp_path / "x.npz", x=numpy.array([[1.5, -2.0]], dtype=">f4"))
        assert batches(tmp_path / "x.npz")[0].tolist() == [[1.5, -2.0]]

    def test_samples_are_spread(self, tmp_path: Path) -> None:
        (found,) = batches(save_tensors(tmp_path / "x.safetensors", x=torch.arange(10.0)), num_samples=4)
        assert found.tolist() == [0, 2, 5, 7]

    @pytest.mark.parametrize("option", [{"size": Size(4, 4)}, {"resize": 3}, {"gray": True}, {"mean": Numbers([0.5])}])
    def test_options_of_images_are_refused(self, tmp_path: Path, option: dict[str, Any]) -> None:
        file = save_tensors(tmp_path / "x.safetensors", x=torch.zeros(3, 4))
        with pytest.raises(typer.BadParameter, match=rf"--{next(iter(option))} cannot be used with x\.safetensors"):
            batches(file, **option)

    def test_counts_differ(self, tmp_path: Path) -> None:
        file = save_tensors(tmp_path / "x.safetensors", query=torch.zeros(3), key=torch.zeros(4))
        with pytest.raises(LoadingError, match=r"same number of samples.*key \(4,\), query \(3,\)"):
            batches(file, Pair())

    @pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
    def test_damaged(self, tmp_path: Path, name: str) -> None:
        pytest.importorskip("numpy")
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(LoadingError, match=r"cannot be read as arrays|not a whole safetensors file"):
            batches(tmp_path / name)

    def test_pickled_objects_are_never_opened(self, tmp_path: Path) -> None:
        numpy = pytest.importorskip("numpy")
        numpy.savez(tmp_path / "x.npz", x=numpy.array([{}], dtype=object))
        with pytest.raises(LoadingError, match="allow_pickle=False"):
            batches(tmp_path / "x.npz")

    def test_without_numpy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "x.npz").touch()
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(MissingExtraError, match=r"pip install "):
            batches(tmp_path / "x.npz")


@pytest.mark.usefixtures("project")
class TestFactory:
    def test_function_and_stored_batches(self) -> None:
        assert len(batches("own_project:batches")) == 6
        assert len(batches("own_project:stored")) == 1

    def test_stops_at_the_samples_wanted(self) -> None:
        assert len(batches("own_project:batches", num_samples=10)) == 3

    def test_a_mask_before_the_samples_does_not_count_as_samples(self) -> None:
        """Masks of 10 rows before batches of 4 samples: as many batches as without the mask."""
        assert len(batches("own_project:masked", num_samples=10)) == 3

    def test_can_be_walked_again(self) -> None:
        data = load_data("own_project:batches", DataOptions(), Inputs.of(nn.ReLU()))
        assert len(list(data)) == len(list(data)) == 6

    def test_options_are_refused(self) -> None:
        with pytest.raises(typer.BadParameter, match="--batch-size cannot be used with own_project:batches"):
            batches("own_project:batches", batch_size=3)

    def test_no_batches_in_it(self) -> None:
        with pytest.raises(LoadingError, match="is a int; name a function that returns batches"):
            batches("own_project:number")

    def test_its_fault_is_told(self) -> None:
        with pytest.raises(LoadingError, match=r"failed after 0 samples: ValueError: no such checkpoint \(own_project"):
            batches("own_project:broken")


class TestNames:
    @pytest.mark.parametrize("source", ["nowhere", "nowhere.npz", "nowhere.safetensors"])
    def test_nothing_there(self, source: str) -> None:
        with pytest.raises(LoadingError, match="there is no such"):
            batches(source)

    def test_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").touch()
        with pytest.raises(LoadingError, match=r"unknown kind of file; give an image folder, a \.npz"):
            batches(tmp_path / "x.csv")


@pytest.mark.parametrize(("total", "wanted"), [(10, 4), (10, 10), (3, 8), (1797, 256)])
def test_spread_is_even_and_without_repeats(total: int, wanted: int) -> None:
    places = spread(total, wanted)
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert len(places) == min(total, wanted) and places[0] == 0 and places[-1] < total
    assert max(gaps) - min(gaps) <= 1 and min(gaps) >= 1
