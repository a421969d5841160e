"""Tiny models of the families that people export, from configurations alone, answer as in torch: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from halfserve.export.half_module.to_half import to_half
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.architectures import ARCHITECTURES, SIZES
from tests.export.to_onnx.answers import difference, halved, session

BATCH = {0: "batch"}
TOKENS = {0: "batch", 1: "length"}
IDS, IMAGES = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0)), torch.rand(2, 3, 32, 32)
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 99}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model and how it is called.

    Attributes:
        make: Makes it.
        inputs: Example inputs; constants among them are part of the call.
        shapes: Which sizes vary; `length` is tried at several.
        lengths: Values of `length` to try; its limits in the exported model must allow them.
        single: Whether the float32 model is exported.
        half: Whether the half model is.
    """

    make: Callable[[], nn.Module]
    inputs: dict[str, Any]
    shapes: dict[str, dict[int, str]]
    lengths: tuple[int, ...] = (7,)
    single: bool = True
    half: bool = True


class Recurrent(nn.Module):
    """(batch, length, 8) -> (batch, length, 4), through both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, last = self.gru(self.lstm(x)[0])
        return steps, last


class UNet(nn.Module):
    """(batch, 1, height, width), both even, to the same shape, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.down(x)
        result: Tensor = self.out(torch.cat([shallow, self.up(self.deep(shallow))], dim=1))
        return result


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=40))


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1, max_position_embeddings=40))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, enable_nested_tensor=False)


def _text(make: Callable[[], nn.Module], constants: dict[str, Any], **which: Any) -> Family:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), **constants}
    return Family(
        make=make, inputs=inputs, shapes=dict.fromkeys(("input_ids", "attention_mask"), TOKENS), lengths=(1, 7, 11), **which
    )


def _image(make: Callable[[], nn.Module], **which: Any) -> Family:
    return Family(make=make, inputs={"pixel_values": IMAGES}, shapes={"pixel_values": BATCH}, **which)


FAMILIES = {
    "bert": _text(ARCHITECTURES["bert"].make, {}, half=False),
    "gpt2": _text(_gpt2, {"use_cache": False}, half=False),
    "llama": _text(_llama, {"use_cache": False}, single=False),
    "vit": _image(ARCHITECTURES["vit"].make, single=False),
    "convnext": _image(ARCHITECTURES["convnext"].make, single=False),
    "segformer": _image(ARCHITECTURES["segformer"].make, half=False),
    "swin": _image(ARCHITECTURES["swin"].make, half=False),
    "wav2vec2": Family(
        make=ARCHITECTURES["wav2vec2"].make,
        inputs={"input_values": torch.randn(2, 400)},
        shapes={"input_values": BATCH},
        half=False,
    ),
    "t5": _text(ARCHITECTURES["t5-encoder"].make, {}, half=False),
    "recurrent": Family(
        single=False, make=Recurrent, inputs={"x": torch.randn(2, 7, 8)}, shapes={"x": TOKENS}, lengths=(1, 7, 11)
    ),
    "unet": Family(single=False, make=UNet, inputs={"x": torch.randn(2, 1, 16, 16)}, shapes={"x": BATCH}),
    "encoder": Family(
        single=False, make=_encoder, inputs={"src": torch.randn(2, 7, 16)}, shapes={"src": TOKENS}, lengths=(1, 7, 11)
    ),
}


def resized(family: Family, batch: int, length: int) -> dict[str, Any]:
    """The inputs at another batch size and length, their values repeated."""
    return {name: _resized(value, family.shapes.get(name, {}), batch, length) for name, value in family.inputs.items()}


def _resized(value: Any, axes: dict[int, str], batch: int, length: int) -> Any:
    for axis, name in axes.items():
        size = {"batch": batch, "length": length}.get(name, value.shape[axis])
        value = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return value


FP32_TOLERANCE, HALF_TOLERANCE = 5e-6, 5e-3
SINGLE = [name for name, family in FAMILIES.items() if family.single]
HALF = [name for name, family in FAMILIES.items() if family.half]


def lanes(names: list[str], *, short: set[str]) -> list[Any]:
    """Representatives in the short lane, the other families in the long one."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]


@pytest.mark.long
@pytest.mark.parametrize("name", lanes(SINGLE, short={"bert"}))
def test_float32_answers_as_torch_does_at_every_size(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    module = family.make().eval()
    model = export_onnx(module, family.inputs, dynamic_shapes=family.shapes)
    opened = session(model)
    for batch, length in product((1, 2, 5), family.lengths):
        found = difference(module, opened, resized(family, batch, length))
        assert found < FP32_TOLERANCE, (batch, length)
    assert all(any(entry.key == "halfserve.module" for entry in node.metadata_props) for node in model.graph.node)
    limits = json.loads(next(entry.value for entry in model.metadata_props if entry.key == "halfserve.dimensions"))
    assert set(limits) == {size for sizes in family.shapes.values() for size in sizes.values()}
    assert limits["batch"] == [1, None]
    least, most = limits.get("length", [1, None])
    assert least <= min(family.lengths)
    assert most is None or max(family.lengths) <= most


@pytest.mark.long
@pytest.mark.parametrize("name", lanes(HALF, short={"vit"}))
def test_the_half_module_answers_within_float16_at_every_size(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    module = family.make().eval()
    model = export_onnx(to_half(module).module, halved(family.inputs), dynamic_shapes=family.shapes)
    opened = session(model)
    for batch, length in product((1, 2, 5), family.lengths):
        assert difference(module, opened, resized(family, batch, length), half=True) < HALF_TOLERANCE, (batch, length)
