"""A ResNet-50, a BERT-base and a MiniLM with random weights, exported like `halfserve export` does, in float32 and float16."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from benchmarks.cuda_device.networks import FP16, FP32, Network, network_of
from halfserve import convert_float_to_float16, export_onnx


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
    network = network_of(folder, name, tiny=tiny)
    length, words = (128 if name == "bert" else 50), (100 if tiny else 30_522)
    module: nn.Module
    if name == "resnet":
        module = ResNet((1, 1), 8) if tiny else ResNet()
    else:
        layers, width = {"bert": (12, 768), "minilm": (6, 384)}[name]
        module = Bert(2, 32, 4, length, words) if tiny else Bert(layers, width, 12, length, words)
    exported = export_onnx(module.eval(), [torch.from_numpy(network.rows(2))], network.path(FP32), output_names=["y"])
    onnx.save(convert_float_to_float16(exported, keep_io_types=False), network.path(FP16))
    return network


def _convolution(channels: int, kept: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, kept, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(kept), nn.ReLU()]
