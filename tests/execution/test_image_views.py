from __future__ import annotations

import torch

from sparsebit.execution.held_out import Piece, Split
from sparsebit.execution.image_views import has_images, image_view, is_images, patched_images, view_of, with_views


def images(count: int = 64) -> torch.Tensor:
    """Each has one bright pixel, at row 6 and column 4 of 16 x 8."""
    found = torch.zeros(count, 1, 16, 8)
    found[:, :, 6, 4] = 1
    return found


def test_images_are_mirrored_and_shifted_by_at_most_an_eighth() -> None:
    found = image_view(images(), torch.Generator().manual_seed(0))
    places = {(row, column) for _, _, row, column in found.nonzero().tolist()}
    assert {row for row, _ in places} == {4, 5, 6, 7, 8}
    assert {column for _, column in places} == {2, 3, 4, 5}  # 4 and its mirror image, 3, moved by one
    assert found.shape == images().shape


def test_the_first_view_is_the_image_and_each_other_one_is_fixed() -> None:
    batch = {"x": torch.rand(4, 3, 16, 16), "lengths": torch.arange(4)}
    views = [view_of(Piece(0, view=view), batch, seed=0) for view in range(3)]
    assert torch.equal(views[0]["x"], batch["x"])
    assert not torch.equal(views[1]["x"], views[2]["x"])
    assert all(torch.equal(view["lengths"], batch["lengths"]) for view in views)
    again = view_of(Piece(0, view=1), batch, seed=0)
    assert torch.equal(again["x"], views[1]["x"])
    other = view_of(Piece(0, view=1), batch, seed=1)
    assert not torch.equal(other["x"], views[1]["x"])


def test_every_piece_has_all_views() -> None:
    split = with_views(Split((Piece(0, (0, 1), (True,)), Piece(1)), (Piece(0, (2,), (True,)),)), 3)
    assert [(piece.batch, piece.view) for piece in split.learned] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert split.held == tuple(Piece(0, (2,), (True,), view) for view in range(3))
    split = with_views(Split((Piece(0),), (Piece(1),)), 1, held=2)
    assert (split.learned, split.held) == ((Piece(0),), (Piece(1), Piece(1, view=1)))


def test_what_is_an_image() -> None:
    assert is_images(torch.rand(2, 3, 8, 8)) and has_images({"x": [torch.rand(2, 3, 8, 8)]})
    assert not is_images(torch.rand(2, 3, 7, 8)) and not is_images(torch.rand(2, 3, 8))
    assert not has_images({"x": torch.zeros(2, 3, 8, 8, dtype=torch.long)})
    assert not has_images({"x": torch.rand(2, 3, 8, 8), "mask": torch.rand(2, 1, 8, 8)})


def test_patches_are_rectangles_of_other_images() -> None:
    numbered = torch.arange(64.0).view(64, 1, 1, 1).expand(64, 2, 12, 16).contiguous()
    found = patched_images(numbered, 0.5, torch.Generator().manual_seed(0))
    foreign = found != numbered
    is_patched = foreign.flatten(1).any(1)
    assert 20 < int(is_patched.sum()) < 44
    for image, own in zip(found[is_patched], foreign[is_patched], strict=True):
        assert len(set(image[own].tolist())) == 1  # of one other image
        rows, columns = own[0].any(1), own[0].any(0)
        assert torch.equal(own[0], rows[:, None] & columns) and torch.equal(own[0], own[1])
        for side in (rows, columns):  # without a gap
            places = side.nonzero().flatten()
            assert int(places[-1] - places[0]) + 1 == len(places)
    assert torch.equal(patched_images(numbered, 0.0, torch.Generator()), numbered)
