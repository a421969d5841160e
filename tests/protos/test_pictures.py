"""preprocessing.json, and the pictures that it prepares: broken, too large, and in every mode."""

from __future__ import annotations

import json
import warnings
import zlib
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from halfserve.protos.picture_files import PictureError
from halfserve.protos.pictures import EncodedPicture, PicturePreparation, prepared_pixels

PREPARATION = PicturePreparation(height=32, width=24, resize=40, resample="bicubic", crop="even")


def encoded(form: str, mode: str = "RGB", size: tuple[int, int] = (60, 50), **options: Any) -> bytes:
    colours = np.kron(np.random.default_rng(0).integers(0, 255, (5, 6, 3)), np.ones((10, 10, 1))).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(colours).resize(size).convert(mode).save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["1", "CMYK", "I;16", "L", "LA", "P", "RGB", "RGBA"])
def test_pictures_of_every_mode_become_rgb(form: str, mode: str) -> None:
    try:
        data = encoded(form, mode)
    except (OSError, ValueError):
        pytest.skip(f"{form} has no {mode}")
    pixels = prepared_pixels(data, PREPARATION)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (32, 24, 3)


@pytest.mark.parametrize("preparation", [PREPARATION, PicturePreparation(height=8, width=9, resize=(8, 9), resample="box")])
def test_a_preparation_is_read_as_it_was_written(preparation: PicturePreparation) -> None:
    assert PicturePreparation.from_bytes(preparation.to_bytes()) == preparation


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no filter": ({"resample": "soft"}, "has the filter 'soft', expected one of nearest, lanczos"),
    "a flag": ({"height": True}, "has a size that is no whole number"),
    "an endless size": ({"resize": {"shortest_edge": 10**9}}, "has a size that is not from 1 to 16384"),
    "too small": ({"resize": {"height": 32, "width": 23}}, "scales to 32 by 23, which is smaller than 32 by 24"),
    "no size": ({"resize": {"height": 32}}, "lacks 'width'"),
    "a list": ({"resize": [32]}, "is not as export writes it"),
    "a crop": ({"crop": "up"}, "rounds a crop by 'up', expected floor or even"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_preprocessing_json_is_refused(case: str) -> None:
    changed, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        PicturePreparation.from_bytes(json.dumps({**json.loads(PREPARATION.to_bytes()), **changed}).encode())


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"not a picture", b"\xff\xd8\xff\xe0", encoded("BMP"), encoded("GIF")])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(PictureError, match=r"^is no JPEG, PNG or WebP picture that can be read: [^<]+$"):
        EncodedPicture(data)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_broken_files_are_refused_whatever_is_broken(form: str) -> None:
    whole = encoded(form)
    generator = np.random.default_rng(0)
    with pytest.raises(PictureError):
        prepared_pixels(whole[: len(whole) // 2], PREPARATION)
    for _ in range(300):
        broken = np.frombuffer(whole, np.uint8).copy()
        broken[generator.integers(0, len(broken), 8)] = generator.integers(0, 256, 8)
        with suppress(PictureError):
            assert prepared_pixels(broken.tobytes(), PREPARATION).shape == (32, 24, 3)


@pytest.mark.parametrize("size", [(9000, 9000), (15000, 15000)])
def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    file = BytesIO()
    Image.new("1", size).save(file, "PNG")
    with pytest.raises(PictureError, match="expected at most 67,108,864"):
        EncodedPicture(file.getvalue())


def test_a_picture_that_is_scaled_to_too_many_pixels_is_refused() -> None:
    file = BytesIO()
    Image.new("1", (1, 60_000)).save(file, "PNG")
    with pytest.raises(PictureError, match="too long and narrow for this model, which scales it to 96,000,000 pixels"):
        prepared_pixels(file.getvalue(), PREPARATION)


def scan_of(progressive: bytes) -> bytes:
    """The last scan of a progressive JPEG, with the table before it."""
    return progressive[progressive.rindex(b"\xff\xc4") : -2]


def with_scans(data: bytes, more: int) -> bytes:
    return data[:-2] + scan_of(data) * more + data[-2:]


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def chunk(name: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")


def behind_header(png: bytes, *chunks: bytes) -> bytes:
    return png[:33] + b"".join(chunks) + png[33:]


def exif_of(orientation: int, size: int = 0) -> bytes:
    entry = b"\x01\x12\x00\x03\x00\x00\x00\x01" + orientation.to_bytes(2, "big") + b"\0\0"
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + entry + bytes(4 + size)


JPEG, PNG, WEBP = (encoded(form) for form in ("JPEG", "PNG", "WEBP"))
PASSES = encoded("JPEG", progressive=True)
BOMBS: dict[str, tuple[bytes, str]] = {
    "scans": (with_scans(PASSES, 30_000), "has more than 100 scans, expected at most as many"),
    "scans of a baseline JPEG": (JPEG[:-2] + JPEG[JPEG.rindex(b"\xff\xda") : -2] * 200 + JPEG[-2:], "more than 100 scans"),
    "scans of many pixels": (
        with_scans(encoded("JPEG", "L", (5000, 5000), progressive=True), 20),
        "has 5000 by 5000 pixels in 17 passes, which take too long to decode",
    ),
    "arithmetic coding": (JPEG.replace(b"\xff\xc0", b"\xff\xc9", 1), "a lossless or arithmetically coded JPEG"),
    "segments": (JPEG[:2] + segment(0xFE, b"") * 20_000 + JPEG[2:], "consists of more than 16,384 parts"),
    "chunks": (behind_header(PNG, chunk(b"tEXt", b"a\0b") * 20_000), "consists of more than 16,384 parts"),
    "Exif of a PNG": (behind_header(PNG, chunk(b"eXIf", exif_of(1, 524_288))), "has 524,3.. bytes of Exif, expected at most"),
    "Exif of a WebP": (encoded("WEBP", exif=exif_of(1, 524_288)), "has 524,3.. bytes of Exif, expected at most"),
    "wide values": (
        PNG[:16] + (7500).to_bytes(4, "big") * 2 + b"\x10\x06" + PNG[26:],
        "has 7500 by 7500 pixels in 16 bits a value, which take too long to decode",
    ),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_picture_that_would_take_long_is_refused_before_it_is_decoded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, message = BOMBS[case]
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(PictureError, match=message):
        EncodedPicture(data)


def test_texts_profiles_and_exif_do_not_reach_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zlib.compress(bytes(2**20))
    texts = [chunk(b"zTXt", b"a%d\0\0" % n + bomb) for n in range(60)]
    texts += [chunk(b"iTXt", b"b\0\1\0\0\0" + bomb), chunk(b"tEXt", b"c\0d"), chunk(b"iCCP", b"e\0\0" + bomb)]
    wanted = prepared_pixels(PNG, PREPARATION)
    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", None)
    np.testing.assert_array_equal(prepared_pixels(behind_header(PNG, *texts), PREPARATION), wanted)
    seen: list[bytes] = []
    unwatched = Image.open

    def watched(file: BytesIO, **options: Any) -> Image.Image:
        seen.append(file.getvalue())
        return unwatched(file, **options)

    monkeypatch.setattr(Image, "open", watched)
    further = (
        segment(0xE1, b"Exif\0\0" + bytes(60_000)) * 9 + segment(0xE2, b"ICC_PROFILE\0" + bytes(900)) + segment(0xFE, b"a")
    )
    for plain, data in ((JPEG, JPEG[:2] + further + JPEG[2:]), (WEBP, encoded("WEBP", icc_profile=bytes(9000)))):
        np.testing.assert_array_equal(prepared_pixels(data, PREPARATION), prepared_pixels(plain, PREPARATION))
    assert max(map(len, seen)) < 5000


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    upright = ImageOps.exif_transpose(Image.open(BytesIO(encoded(form, exif=exif, size=(60, 50)))))
    wanted = np.asarray(PREPARATION.applied(upright.convert("RGB")))
    for block in (exif, exif_of(orientation)):
        np.testing.assert_array_equal(prepared_pixels(encoded(form, exif=block, size=(60, 50)), PREPARATION), wanted)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_decoding_warns_of_nothing(form: str) -> None:
    data = [encoded(form, exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(200)))]
    if form == "PNG":
        data.append(encoded(form, "P", transparency=bytes(range(256))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in data:
            assert prepared_pixels(one, PREPARATION).shape == (32, 24, 3)
    assert not caught
