"""preprocessing.json, and the pictures that it prepares: broken, too large, and in every mode."""

from __future__ import annotations

import json
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfserve.protos.pictures import EncodedPicture, PictureError, PicturePreparation, prepared_pixels

PREPARATION = PicturePreparation(height=32, width=24, resize=40, resample="bicubic", crop="even")
RNG = np.random.default_rng(0)


def encoded(form: str, mode: str = "RGB", size: tuple[int, int] = (60, 50), **options: Any) -> bytes:
    colours = np.kron(RNG.integers(0, 255, (5, 6, 3)), np.ones((10, 10, 1))).astype(np.uint8)
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
