"""Pixels -> tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sparsebit.cli.inputs.images import UnreadableImage, channels_first, image_files, normalized, read_image
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.options import Size
from sparsebit.errors import MissingExtraError

Image = pytest.importorskip("PIL.Image")


def saved(file: Path, width: int, height: int, mode: str = "RGB") -> Path:
    """An image whose left half is black and whose right half is white."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (width, height))
    image.paste((255, 255, 255), (width // 2, 0, width, height))
    image.convert(mode).save(file)
    return file


class TestFiles:
    def test_flat_and_by_class_in_order(self, tmp_path: Path) -> None:
        for name in ("b/2.png", "a/1.JPG", "0.webp", ".hidden.png", "readme.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        assert [str(file.relative_to(tmp_path)) for file in image_files(tmp_path)] == ["0.webp", "a/1.JPG", "b/2.png"]

    def test_through_links_but_not_in_circles(self, tmp_path: Path) -> None:
        saved(tmp_path / "store" / "1.png", 4, 4)
        photos = tmp_path / "photos"
        photos.mkdir()
        (photos / "class").symlink_to(tmp_path / "store")
        (tmp_path / "store" / "again").symlink_to(photos)
        (photos / "broken").symlink_to(tmp_path / "nowhere")
        (photos / "0.png").symlink_to(tmp_path / "store" / "1.png")
        assert [str(file.relative_to(photos)) for file in image_files(photos)] == ["0.png", "class/1.png"]

    def test_kinds_that_are_not_read_are_told(self, tmp_path: Path) -> None:
        (tmp_path / "1.HEIC").touch()
        with pytest.raises(LoadingError, match=r"no images .* not those in it \(1 x .heic\): convert them"):
            image_files(tmp_path)
        saved(tmp_path / "2.png", 4, 4)
        with pytest.warns(UserWarning, match=r"left out \(1 x .heic\)"):
            assert len(image_files(tmp_path)) == 1

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(LoadingError, match=r"no images in it.*\.png"):
            image_files(tmp_path)


class TestReadImage:
    def test_same_size_is_untouched(self, tmp_path: Path) -> None:
        image = read_image(saved(tmp_path / "x.png", 4, 2), Size(2, 4))
        assert image.dtype == torch.uint8 and image.shape == (3, 2, 4)
        assert image[0, 0].tolist() == [0, 0, 255, 255]

    @pytest.mark.parametrize(("width", "height"), [(40, 20), (20, 40), (5, 7)], ids=["wide", "high", "small"])
    def test_covers_and_cuts_the_centre(self, tmp_path: Path, width: int, height: int) -> None:
        image = read_image(saved(tmp_path / "x.png", width, height), Size(10, 10))
        assert image.shape == (3, 10, 10)
        assert (
            image[0, :, 0].max() == 0 and image[0, :, -1].min() == 255
        )  # the edge between the halves is in the middle

    def test_resize_then_cut(self, tmp_path: Path) -> None:
        assert read_image(saved(tmp_path / "x.png", 40, 20), Size(8, 6), resize=10).shape == (3, 8, 6)

    def test_resize_below_size(self, tmp_path: Path) -> None:
        with pytest.raises(LoadingError, match="becomes 4x8, less than --size 6x6"):
            read_image(saved(tmp_path / "x.png", 40, 20), Size(6, 6), resize=4)

    @pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
    def test_any_mode(self, tmp_path: Path, mode: str) -> None:
        file = saved(tmp_path / ("x.jpg" if mode == "CMYK" else "x.png"), 4, 4, mode)
        assert read_image(file, Size(4, 4)).shape == (3, 4, 4)
        assert read_image(file, Size(4, 4), gray=True).shape == (1, 4, 4)

    def test_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").write_bytes(b"\x89PNG")
        with pytest.raises(LoadingError, match=r"x\.png: "):
            read_image(tmp_path / "x.png", Size(4, 4))

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_tiffs_are_upright_or_refused(self, orientation: int, tmp_path: Path) -> None:
        image = Image.new("L", (4, 4))
        image.putdata(range(0, 160, 10))
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(tmp_path / "x.png", exif=exif)
        image.save(tmp_path / "x.tif", tiffinfo={0x0112: orientation})
        if orientation > 4:  # Pillow gives noise
            with pytest.raises(UnreadableImage, match="on its side"):
                read_image(tmp_path / "x.tif", Size(4, 4))
        else:
            right = read_image(tmp_path / "x.png", Size(4, 4))
            assert torch.equal(read_image(tmp_path / "x.tif", Size(4, 4)), right)

    @pytest.mark.parametrize(("mode", "suffix"), [("I;16", ".png"), ("I;16", ".tif"), ("I", ".tif")])
    def test_16_bits_are_scaled(self, tmp_path: Path, mode: str, suffix: str) -> None:
        image = Image.new(mode, (3, 1))
        for place, value in enumerate((0, 32768, 65535)):
            image.putpixel((place, 0), value)
        image.save(tmp_path / f"x{suffix}")
        assert read_image(tmp_path / f"x{suffix}", Size(1, 3))[0, 0].tolist() == [0, 128, 255]

    def test_16_bits_of_a_pgm(self, tmp_path: Path) -> None:
        (tmp_path / "x.pgm").write_bytes(b"P5 2 1 65535\n" + bytes([0x80, 0, 0xFF, 0xFF]))
        assert read_image(tmp_path / "x.pgm", Size(1, 2), gray=True)[0, 0].tolist() == [128, 255]

    def test_32_bits_of_unknown_range(self, tmp_path: Path) -> None:
        for value in (1 << 20, -1, 200):
            Image.new("I", (4, 4), value).save(tmp_path / "x.tif")
            with pytest.raises(UnreadableImage, match="32 bits, of unknown range"):
                read_image(tmp_path / "x.tif", Size(4, 4))

    def test_pixels_that_are_nan(self, tmp_path: Path) -> None:
        image = Image.new("F", (4, 4), 0.5)
        image.putpixel((1, 1), float("nan"))
        image.save(tmp_path / "x.tif")
        with pytest.raises(UnreadableImage, match="NaN"):
            read_image(tmp_path / "x.tif", Size(4, 4))

    @pytest.mark.parametrize(("value", "byte"), [(0.5, 128), (300.0, None)])
    def test_float_pixels(self, tmp_path: Path, value: float, byte: int | None) -> None:
        Image.new("F", (4, 4), value).save(tmp_path / "x.tif")
        if byte is None:
            with pytest.raises(UnreadableImage, match="unknown range"):
                read_image(tmp_path / "x.tif", Size(4, 4))
        else:
            assert read_image(tmp_path / "x.tif", Size(4, 4)).unique().tolist() == [byte]

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"])
    def test_every_mode_is_three_channels(self, tmp_path: Path, mode: str) -> None:
        file = tmp_path / ("x.tif" if mode in ("CMYK", "YCbCr", "LAB") else "x.png")
        image = Image.new("RGB", (8, 4), (250, 10, 10))
        (image if mode == "LAB" else image.convert("RGB" if mode == "HSV" else mode)).save(file)
        assert read_image(file, Size(4, 8)).shape == (3, 4, 8)

    def test_transparent_colours_of_a_palette(self, tmp_path: Path) -> None:
        image = Image.new("RGB", (4, 4), (200, 10, 10)).convert("P")
        image.save(tmp_path / "x.png", transparency=bytes([0] * 256))
        assert read_image(tmp_path / "x.png", Size(4, 4))[0].float().mean() > 150

    def test_upright_as_exif_says(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # turned by 90 degrees
        image = Image.new("RGB", (8, 4))
        image.paste((255, 255, 255), (4, 0, 8, 4))
        image.save(tmp_path / "x.png", exif=exif)
        found = read_image(tmp_path / "x.png", Size(8, 4))
        assert found[0, 0].max() == 0 and found[0, -1].min() == 255

    def test_first_frame_of_an_animation(self, tmp_path: Path) -> None:
        frames = [Image.new("RGB", (4, 4), (level, level, level)) for level in (0, 255)]
        frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
        assert read_image(tmp_path / "x.gif", Size(4, 4)).max() == 0

    def test_decompression_bomb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        saved(tmp_path / "x.png", 40, 40)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(UnreadableImage, match="decompression bomb"):
            read_image(tmp_path / "x.png", Size(4, 4))

    def test_a_line_that_would_become_a_plane(self, tmp_path: Path) -> None:
        saved(tmp_path / "x.png", 60_000, 1)
        with pytest.raises(UnreadableImage, match="would become 512x"):
            read_image(tmp_path / "x.png", Size(512, 512))

    def test_without_pillow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingExtraError, match=r"pip install "):
            read_image(tmp_path / "x.png", Size(4, 4))


class TestNormalized:
    def test_formula(self) -> None:
        pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
        mean, std = (0.1, 0.2, 0.5), (0.5, 1.0, 0.25)
        assert normalized(pixels, mean, std).flatten().tolist() == pytest.approx([-0.2, 0.0, 2.0], abs=1e-6)

    def test_plain_is_0_to_1(self) -> None:
        assert normalized(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), None, None).item() == 1.0

    def test_wrong_count(self) -> None:
        with pytest.raises(LoadingError, match="--std has 3 numbers, but the images have 1 channels"):
            normalized(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), (0.5,), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(("shape", "expected"), [
    ((2, 5, 6, 3), (2, 3, 5, 6)), ((2, 3, 5, 6), (2, 3, 5, 6)), ((2, 5, 6), (2, 1, 5, 6)), ((2, 5, 6, 1), (2, 1, 5, 6)),
], ids=["NHWC", "NCHW", "NHW", "NHW1"])  # fmt: skip
def test_channels_first(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert channels_first(torch.zeros(shape), "here").shape == expected


def test_no_images() -> None:
    with pytest.raises(LoadingError, match=r"here: bytes of shape \(2, 5, 6, 7\) are not images"):
        channels_first(torch.zeros(2, 5, 6, 7), "here")
