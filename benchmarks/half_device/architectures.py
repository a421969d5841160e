"""Networks with random weights of the size that training gives, exported in float32 with samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
import transformers
from torch import Tensor, nn

from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.architectures import ARCHITECTURES, Architecture, images, natural_weights, sentences

Arrays = dict[str, np.ndarray[Any, Any]]


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
    """The architecture in float32, with weights of the size that training gives, and its samples.

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
