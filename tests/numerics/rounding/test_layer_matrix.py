from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsebit.numerics.rounding import layer_matrix as module
from sparsebit.numerics.rounding.layer_matrix import layer_matrix

LAYERS = {
    "linear": (nn.Linear(6, 4), (2, 3, 6)),
    "linear, one row": (nn.Linear(6, 4), (6,)),
    "conv": (nn.Conv2d(4, 6, 3), (3, 4, 7, 8)),
    "strided, dilated, padded": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 2)), (3, 4, 9, 8)),
    "same": (nn.Conv2d(4, 6, (4, 3), padding="same", dilation=2), (2, 4, 9, 8)),
    "valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8)),
    "reflect": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (2, 4, 7, 8)),
    "circular": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), (2, 4, 7, 8)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 7, 8)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 7, 8)),
    "depthwise, multiplied": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 8)),
    "unbatched": (nn.Conv2d(4, 6, 3), (4, 7, 8)),
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "3d": (nn.Conv3d(4, 6, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2), (2, 4, 3, 5, 6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 6)),
    "transposed, everything": (
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=2, groups=2),
        (2, 4, 5, 6),
    ),
    "transposed, cropped": (nn.ConvTranspose2d(4, 6, 2, stride=2, padding=2), (2, 4, 5, 6)),
    "transposed depthwise 1d": (nn.ConvTranspose1d(4, 4, 4, stride=2, padding=1, groups=4), (2, 4, 9)),
    "transposed 3d": (nn.ConvTranspose3d(2, 4, 2, stride=2, groups=2), (1, 2, 3, 2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("chunk", [1, 1 << 20], ids=["sample by sample", "whole"])
def test_the_product_is_the_layers_output(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    layer, shape = LAYERS[name]
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    form = layer_matrix(layer)
    assert form is not None
    patches = torch.cat(list(form.patches(x)), 1)  # (groups, positions, columns)
    product = patches @ form.matrix(layer.weight).mT  # (groups, positions, rows)
    expected = layer(x) - 0
    with torch.no_grad():
        assert torch.equal(form.weight(form.matrix(layer.weight), layer.weight.shape), layer.weight)
        torch.testing.assert_close(product, _per_group(expected, layer, form.groups, form.num_dims))


class TestParts:
    """Very wide layers: second moments between the parts of their columns are not looked at."""

    @pytest.mark.parametrize("name", LAYERS)
    def test_the_sum_over_parts_is_the_layers_output(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        layer, shape = LAYERS[name]
        layer = layer.double()
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        whole = layer_matrix(layer)
        assert whole is not None
        groups, _, columns = whole.matrix(layer.weight).shape
        monkeypatch.setattr(module, "_MOST_MOMENTS", groups * columns**2 - 1)
        form = whole.in_parts(layer.weight)
        assert form.parts > 1
        product = torch.cat(list(form.patches(x)), 1) @ form.matrix(layer.weight).mT
        summed = product.unflatten(0, (form.groups, form.parts)).sum(1)
        with torch.no_grad():
            assert torch.equal(form.weight(form.matrix(layer.weight), layer.weight.shape), layer.weight)
            torch.testing.assert_close(summed, _per_group(layer(x), layer, form.groups, form.num_dims))
            one = form.outputs(product[:, 0])
            torch.testing.assert_close(one, summed[:, 0].flatten())

    def test_how_many(self) -> None:
        def parts(columns: int, multiple: int = 1) -> int:
            form = layer_matrix(nn.Linear(2, 2))
            assert form is not None
            return form.in_parts(torch.empty(1, columns, device="meta"), multiple).parts

        assert parts(4608) == parts(5000) == 1
        assert parts(9216) == 4
        assert parts(25088) == 28
        assert parts(25088, 256) == 49  # parts of 512 columns
        assert parts(25088, 1000) == parts(10007) == 1  # they cannot be divided so


def _per_group(output: Tensor, layer: nn.Module, groups: int, num_dims: int) -> Tensor:
    if num_dims == 0:
        return (output - layer.bias).reshape(1, -1, output.shape[-1])
    output = output if output.ndim == num_dims + 2 else output[None]
    rows = (output.movedim(1, -1) - layer.bias).flatten(0, -2)
    return rows.unflatten(1, (groups, -1)).movedim(1, 0)


def test_layers_without_a_matrix() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert all(layer_matrix(layer) is None for layer in (Own(2, 2), patched, nn.Embedding(3, 2), nn.ReLU()))


def test_no_images() -> None:
    form = layer_matrix(nn.Conv2d(2, 2, 3))
    assert form is not None and not list(form.patches(torch.zeros(0, 2, 8, 8)))
    assert form.num_rows(torch.zeros(0, 2, 8, 8)) == 0


@pytest.mark.parametrize(("shape", "expected"), [((5, 1), 5), ((2, 3, 4), 6), ((4,), 1), ((0, 4), 0), ((3, 0), 0)])
def test_rows_of_a_linear_layer(shape: tuple[int, ...], expected: int) -> None:
    form = layer_matrix(nn.Linear(1, 1))
    assert form is not None and form.num_rows(torch.zeros(shape)) == expected


def test_no_chunk_is_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, conv = layer_matrix(nn.Linear(6, 4)), layer_matrix(nn.Conv2d(1, 1, 2))
    assert linear is not None and conv is not None
    monkeypatch.setattr(module, "_CHUNK", 12)
    assert [part.shape[1] for part in linear.patches(torch.zeros(5, 6))] == [2, 2, 1]
    assert [part.shape[1] for part in conv.patches(torch.zeros(4, 1, 3, 3))] == [4, 4, 4, 4]  # 16 elements a sample


@pytest.mark.parametrize("name", LAYERS)
def test_every_so_many_positions(name: str) -> None:
    layer, shape = LAYERS[name]
    form = layer_matrix(layer.float())
    assert form is not None
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    everything = torch.cat(list(form.patches(x)), 1)
    assert form.num_rows(x) == everything.shape[1]
    some = torch.cat(list(form.patches(x, 2)), 1)
    assert 0 < some.shape[1] <= everything.shape[1]
    assert form.num_rows(x) < 4 or some.shape[1] < 0.8 * everything.shape[1]
    known = {tuple(row) for row in everything.transpose(0, 1).flatten(1).tolist()}
    assert all(tuple(row) in known for row in some.transpose(0, 1).flatten(1).tolist())


def test_drawn_positions_are_spread_over_tokens_and_columns() -> None:
    """A step that is the length of a sentence, or of a line, must not meet the same place again and again."""
    tokens = torch.arange(8.0).repeat(64, 1)[..., None]  # (64 sentences, 8 tokens, 1)
    linear, conv = layer_matrix(nn.Linear(1, 1)), layer_matrix(nn.Conv2d(1, 1, 1))
    assert linear is not None and conv is not None
    seen = torch.cat(list(linear.patches(tokens, 8)), 1).flatten()
    assert len(seen) == 64 and set(seen.tolist()) == set(range(8))
    images = torch.arange(16.0).reshape(1, 1, 4, 4).repeat(40, 1, 1, 1)
    seen = torch.cat(list(conv.patches(images, 4)), 1).flatten()
    assert set(seen.tolist()) == set(range(16))
    again = torch.cat(list(conv.patches(images, 4)), 1).flatten()
    assert torch.equal(seen, again)  # the float input's rows are those of the quantized one
