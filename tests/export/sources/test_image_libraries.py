"""Image classifiers by their names in timm and torchvision, with weights of the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halfserve.export.conversion_settings import ModuleSettings
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.module_pipeline import export_verified
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.sources.opening import open_source
from halfserve.export.sources.source import Source
from halfserve.export.sources.source_options import SourceOptions
from tests.export.to_onnx.answers import session
from tests.torchvision_on_cpu import imported

LIBRARIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "timm": ("resnet10t", lambda name, classes: imported("timm").create_model(name, num_classes=classes)),
    "torchvision": ("squeezenet1_1", lambda name, classes: imported("torchvision.models").get_model(name, num_classes=classes)),
}


def saved(library: str, classes: int, folder: Path) -> tuple[str, Path]:
    """A name of the library, and weights for so many classes."""
    name, make = LIBRARIES[library]
    torch.manual_seed(0)
    save_file(make(name, classes).state_dict(), folder / "weights.safetensors")
    return f"{library}:{name}", folder / "weights.safetensors"


def opened(argument: str, weights: Path | None = None, **options: Any) -> Source:
    imported("timm")
    return open_source(argument, SourceOptions(weights=weights, **options))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("classes", "labels"), [(1000, 1000), (7, 0)])
def test_the_weights_say_how_many_classes_there_are(library: str, classes: int, labels: int, tmp_path: Path) -> None:
    source = opened(*saved(library, classes, tmp_path))
    images = source.samples.inputs["image"]
    assert (images.dtype, images.shape[3]) == (torch.uint8, 3)
    with torch.no_grad():
        assert source.module(images[:2])["logits"].shape == (2, classes)
    assert source.task is not None
    assert (source.task.name, len(source.task.labels)) == ("image-classification", labels)


def test_images_are_prepared_as_the_library_does(tmp_path: Path) -> None:
    argument, weights = saved("torchvision", 7, tmp_path)
    source = opened(argument, weights)
    models = imported("torchvision.models")
    prepared = models.get_model_weights("squeezenet1_1").DEFAULT.transforms(resize_size=224)  # they are cut already
    image = source.samples.inputs["image"][:1]
    with torch.no_grad():
        expected = source.module.network(prepared(image.permute(0, 3, 1, 2)))  # type: ignore[operator]  # (a module)
        answer = source.module(image)["logits"]
    torch.testing.assert_close(answer, expected)


@pytest.mark.long
def test_a_folder_of_timm_becomes_a_model_with_its_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = imported("timm").create_model("resnet10t", num_classes=3)
    labels = ["cat", "coffee", "galaxy"]
    folder = tmp_path / "my-net"
    imported("timm.models").save_for_hf(network, folder, model_config={"label_names": labels}, safe_serialization=True)
    source = opened(str(folder))
    assert source.task is not None
    assert (source.name, source.task.labels) == ("my-net", tuple(labels))
    target = RepositoryTarget(repository=tmp_path / "models", name=source.name, task=source.task)
    done = export_verified(source.module, source.samples, target, ModuleSettings(), policy=source.policy)
    images = source.samples.inputs["image"][:2]
    (answer,) = session(str(done.path / "model.onnx")).run(None, {"image": images.numpy()})
    with torch.no_grad():
        expected = source.module(images)["logits"].numpy()
    assert np.abs(answer - expected).max() <= 0.01 * np.abs(expected).max()
    assert (tmp_path / "models" / "my-net" / "labels.txt").read_text().split() == labels


REFUSED = {
    "timm:resnet10x": r"timm \S+ has no model 'resnet10x'; did you mean 'resnet10t'\?",
    "timm:resnet10t.nosuch": "timm cannot make 'resnet10t.nosuch': .*nosuch",
    "timm:resnet18": r"weights.safetensors do not fit the ResNet: \d+ of the module's tensors are missing",
    "torchvision:resnet19": r"torchvision has no model 'resnet19'; did you mean 'resnet18'\?",
    "torchvision:ssd300_vgg16": "'ssd300_vgg16' is no image classifier in float32; give a module",
    "torchvision:quantized_resnet18": "is no image classifier in float32",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_opened_is_told(argument: str, tmp_path: Path) -> None:
    _, weights = saved("timm", 5, tmp_path)
    with pytest.raises(ExportError, match=REFUSED[argument]):
        opened(argument, weights)


BROKEN: dict[str, dict[str, Any]] = {
    "a list of settings": {"pretrained_cfg": [1]},
    "no means": {"pretrained_cfg": {"mean": "x"}},
    "no size": {"pretrained_cfg": {"input_size": 5}},
    "no arguments": {"model_args": [3]},
    "no labels": {"label_names": 3},
    "four colours": {"pretrained_cfg": {"mean": [0, 0, 0, 0]}},
    "no count": {"num_classes": "five"},
}


@pytest.mark.parametrize("settings", BROKEN.values(), ids=BROKEN)
def test_a_broken_configuration_is_refused_in_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    content = {"architecture": "resnet10t", "num_classes": 5, **settings}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ExportError, match=r"not as timm writes it: |expected 3, of RGB|timm cannot make 'resnet10t'"
    ) as refused:
        opened(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_nothing_is_made_without_weights() -> None:
    with pytest.raises(UsageError, match="names a network without weights, and none are downloaded; give --weights FILE"):
        opened("timm:resnet10t")
    with pytest.raises(UsageError, match="--task belongs to a Hugging Face folder, and timm:resnet10t is none"):
        opened("timm:resnet10t", task="embeddings")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, weights = saved("timm", 5, tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ExportError, match="timm:resnet10t needs the package timm: pip install timm torch=="):
        open_source(argument, SourceOptions(weights=weights))


@pytest.mark.parametrize("source", ["folder", "timm:resnet10t"])
def test_a_torchvision_of_another_torch_is_named_with_the_cure(source: str, tmp_path: Path) -> None:
    """transformers, timm and torchvision itself import it, and end in forty lines that do not name it."""
    (tmp_path / "torchvision").mkdir()
    lines = ["import torch", "torch.library.register_fake('torchvision::nms')(lambda *_: None)"]  # as its first module does
    (tmp_path / "torchvision" / "__init__.py").write_text("\n".join(lines))
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pth")
    weights = () if source == "folder" else ("--weights", "weights.pth")
    command = [sys.executable, "-m", "halfserve", "export", source, *weights, "--repository", "models"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"halfserve export: torchvision 0.1 does not fit torch {torch.__version__} (RuntimeError: ")
    release = torch.__version__.partition("+")[0]
    assert f"; run: pip uninstall -y torchvision && pip install torchvision torch=={release}" in done.stderr
