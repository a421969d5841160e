"""A ResNet-50, a BERT-base and a MiniLM with random weights, exported like `halfserve export` does, in float32 and float16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from google.protobuf import text_format
from torch import Tensor, nn

from halfserve import convert_float_to_float16, export_onnx
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.padding.padding_rule import KEY
from halfserve.serve.engine.tensors import Array

FP32, FP16 = "fp32", "fp16"
MASKED = -1e4  # added to the logits of padding; float16 has it
LONGEST = 200  # tokens of the model that takes any length
PADDING = "input_ids[1]=0 attention_mask[1]=0 -> "


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(channels, width, 1), *_convolution(width, width, 3, stride), *_convolution(width, 4 * width, 1)[:-1]
        )
        plain = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if plain else nn.Sequential(*_convolution(channels, 4 * width, 1, stride)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width]."""
        return torch.relu(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images to 1000 logits; ResNet-50 with the default sizes (He et al., 2015)."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        layers, channels = [], width
        for stage, count in enumerate(blocks):
            for number in range(count):
                layers.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] -> [batch, 1000]."""
        return torch.as_tensor(self.head(self.layers(self.stem(x)).mean((2, 3))))


class Bert(nn.Module):
    """Token numbers to one vector; BERT-base with the default sizes (Devlin et al., 2018)."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, length: int = 128, words: int = 30_522) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pool = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length], whole numbers -> [batch, width]."""
        return torch.tanh(self.pool(self.encoder(self.norm(self.words(x) + self.places))[:, 0]))


class MiniLM(nn.Module):
    """Token numbers and their mask, of any length, to the mean of the last layer's vectors, as sentence embeddings are made."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Twice [batch, length], whole numbers -> [batch, width]."""
        mask = attention_mask.float()
        x = self.bert.norm(self.bert.words(input_ids) + self.bert.places[: input_ids.shape[1]])
        hidden = self.bert.encoder(x, src_key_padding_mask=(1 - mask) * MASKED)
        return torch.as_tensor((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network in files."""

    name: str  # name of the network
    folder: Path  # folder with NAME_fp32.onnx and NAME_fp16.onnx
    rows: Callable[[int], Array]  # makes a batch

    def path(self, precision: str) -> Path:
        """The model file."""
        return self.folder / f"{self.name}_{precision}.onnx"

    def feeds(self, precision: str, count: int) -> dict[str, Array]:
        """A batch in the dtypes of that file."""
        x = self.rows(count)
        return {"x": x.astype(np.float16) if precision == FP16 and x.dtype == np.float32 else x}


def write_networks(folder: Path, names: list[str], *, tiny: bool) -> list[Network]:
    """Export the networks of these names.

    Args:
        folder: folder to write to.
        names: some of "resnet", "bert" and "minilm", a MiniLM-L6 at 50 tokens.
        tiny: whether to make small networks for tests.
    """
    return [_written(folder, name, tiny=tiny) for name in names]


def _written(folder: Path, name: str, *, tiny: bool) -> Network:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    side, words = (32, 100) if tiny else (224, 30_522)
    module: nn.Module
    if name == "resnet":
        module = ResNet((1, 1), 8) if tiny else ResNet()
        network = Network(
            name=name, folder=folder, rows=lambda n: random.standard_normal((n, 3, side, side)).astype(np.float32)
        )
    else:
        length = {"bert": 128, "minilm": 50}[name]
        layers, width = {"bert": (12, 768), "minilm": (6, 384)}[name]
        module = Bert(2, 32, 4, length, words) if tiny else Bert(layers, width, 12, length, words)
        network = Network(name=name, folder=folder, rows=lambda n: random.integers(0, words, (n, length)))
    exported = export_onnx(module.eval(), [torch.from_numpy(network.rows(2))], network.path(FP32), output_names=["y"])
    onnx.save(convert_float_to_float16(exported, keep_io_types=False), network.path(FP16))
    return network


def write_minilm(repository: Path, *, tiny: bool) -> Path:
    """Write a MiniLM-L6 in float16 that takes any length, as a model with padding in a repository.

    Args:
        repository: repository in which its folder is made.
        tiny: whether to make a small network for tests.

    Returns:
        The model's folder.
    """
    torch.manual_seed(0)
    layers, width, heads = (1, 32, 4) if tiny else (6, 384, 12)
    module = MiniLM(Bert(layers, width, heads, LONGEST)).eval()
    tokens = torch.ones(2, 16, dtype=torch.int64)
    shapes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    exported = export_onnx(module, (tokens, tokens), dynamic_shapes=shapes, output_names=["y"])
    folder = repository / "minilm"
    (folder / "1").mkdir(parents=True)
    onnx.save(convert_float_to_float16(exported, keep_io_types=False), folder / "1" / "model.onnx")
    config = ModelConfig(name="minilm", backend="onnxruntime", max_batch_size=64)
    config.parameters[KEY].string_value = PADDING
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    return folder


def _convolution(channels: int, kept: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, kept, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(kept), nn.ReLU()]
