"""preprocessing.json, which export writes of a library's own preparation of pictures and proves on real ones."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images

from halfserve.export.sources.opening import open_source
from halfserve.export.sources.source import Source
from halfserve.export.sources.source_options import SourceOptions
from halfserve.protos.pictures import PREPROCESSING, PicturePreparation, prepared_pixels
from tests.export.hugging_face_folders import image_folder
from tests.export.sources.test_image_libraries import opened, saved
from tests.torchvision_on_cpu import imported

SIDE = 32  # of the networks' images
EXACT = {"height": SIDE, "width": SIDE}
PROCESSORS: dict[str, dict[str, Any]] = {
    "Bit": {"size": {"shortest_edge": 37}, "crop_size": EXACT},
    "ConvNext": {"size": {"shortest_edge": SIDE}},
    "DeiT": {"size": {"height": 36, "width": 40}, "crop_size": EXACT},
    "EfficientNet": {"size": EXACT},
    "Levit": {"size": {"shortest_edge": SIDE}, "crop_size": EXACT},
    "MobileViT": {"size": {"shortest_edge": 36}, "crop_size": EXACT},
    "PoolFormer": {"size": {"shortest_edge": SIDE}, "crop_size": EXACT},
    "ViT": {"size": EXACT},
}
SHORT = {"ConvNext", "Levit", "PoolFormer", "ViT"}  # those with a rule of their own, and one without
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "Donut": ({"size": EXACT}, "it does not scale pictures to one size"),
    "TextNet": ({"size": {"shortest_edge": SIDE}}, "it makes images of 32 by 64 pixels"),
}


def folder_with(processor: str, settings: dict[str, Any], folder: Path) -> Path:
    image_folder(folder)
    content = {
        "image_processor_type": f"{processor}ImageProcessor",
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.25, 0.3],
        **settings,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return folder


def photos() -> list[Image.Image]:
    """Two that export does not know, each in both orientations."""
    found = [Image.fromarray(array) for array in load_sample_images().images]
    return [*found, *(photo.rotate(90, expand=True) for photo in found)]


def preparation_of(source: Source) -> PicturePreparation:
    assert source.task is not None
    return PicturePreparation.from_bytes(source.task.files[PREPROCESSING])


def as_served(source: Source, photo: Image.Image) -> torch.Tensor:
    """Logits of a picture file, prepared by preprocessing.json."""
    file = BytesIO()
    photo.save(file, "PNG", compress_level=1)
    pixels = prepared_pixels(file.getvalue(), preparation_of(source))
    with torch.no_grad():
        logits: torch.Tensor = source.module(torch.tensor(pixels[None]))["logits"]
    return logits


@pytest.mark.parametrize(
    "processor", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in PROCESSORS]
)
def test_pictures_are_prepared_as_transformers_does(processor: str, tmp_path: Path) -> None:
    folder = folder_with(processor, PROCESSORS[processor], tmp_path / "m")
    source = open_source(str(folder), SourceOptions())
    library: Any = transformers
    own = library.AutoImageProcessor.from_pretrained(folder, backend="pil")
    network = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    for photo in photos():
        with torch.no_grad():
            expected = network(own(photo, return_tensors="pt")["pixel_values"]).logits
        answer = as_served(source, photo)
        assert answer.argmax() == expected.argmax()
        torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)
    assert "preprocessing.json prepares pictures as transformers does: on 12 pictures they differ by at most " in (
        source.samples.note
    )


@pytest.mark.parametrize("processor", OTHERS)
def test_no_preparation_is_written_that_is_not_the_librarys(processor: str, tmp_path: Path) -> None:
    settings, reason = OTHERS[processor]
    source = open_source(str(folder_with(processor, settings, tmp_path / "m")), SourceOptions())
    assert source.task is not None
    assert source.task.files == {}
    assert f"no {PREPROCESSING} is written" in source.samples.note
    assert source.samples.note.endswith(reason)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_pictures_are_prepared_as_timm_and_torchvision_do(library: str, tmp_path: Path) -> None:
    argument, weights = saved(library, 7, tmp_path)
    source = opened(argument, weights)
    assert preparation_of(source).crop == "even"
    network: Any = source.module.network
    if library == "timm":
        data = imported("timm.data")
        own = data.create_transform(**data.resolve_data_config({}, model=network))
    else:
        own = imported("torchvision.models").get_model_weights("squeezenet1_1").DEFAULT.transforms()
    for photo in photos():
        with torch.no_grad():
            expected = network(own(photo)[None])
        answer = as_served(source, photo)
        assert answer.argmax() == expected.argmax()
        torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)


def test_samples_are_prepared_as_pictures_are_served(tmp_path: Path) -> None:
    folder = folder_with("Bit", PROCESSORS["Bit"], tmp_path / "m")
    (tmp_path / "photos").mkdir()
    upright = Image.Exif()
    upright[0x112] = 6
    photo = photos()[0]
    photo.save(tmp_path / "photos" / "a.png", exif=upright)
    source = open_source(str(folder), SourceOptions(samples=tmp_path / "photos"))
    expected = prepared_pixels((tmp_path / "photos" / "a.png").read_bytes(), preparation_of(source))
    assert np.array_equal(source.samples.inputs["image"][0].numpy(), expected)
