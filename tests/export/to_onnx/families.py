"""Tiny models of the families that people export, from configurations alone: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH = {0: "batch"}
TOKENS = {0: "batch", 1: "length"}
IDS, IMAGES = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0)), torch.rand(2, 3, 32, 32)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
}
STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


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


def _t5() -> nn.Module:
    return transformers.T5EncoderModel(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=99)
    )


def _wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **TEXT,
        conv_dim=(8, 8, 8),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC(config)


def _segformer() -> nn.Module:
    pairs: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [4, 1]}
    shapes: dict[str, Any] = {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    config = transformers.SegformerConfig(num_encoder_blocks=2, decoder_hidden_size=16, **pairs, **shapes)
    return transformers.SegformerForSemanticSegmentation(config)


def _swin() -> nn.Module:
    config = transformers.SwinConfig(image_size=16, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=2)
    return transformers.SwinForImageClassification(config)


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


def _image(make: Callable[[], nn.Module], images: Tensor = IMAGES, **which: Any) -> Family:
    return Family(make=make, inputs={"pixel_values": images}, shapes={"pixel_values": BATCH}, **which)


FAMILIES = {
    "bert": _text(lambda: transformers.BertModel(transformers.BertConfig(**TEXT, max_position_embeddings=40)), {}, half=False),
    "gpt2": _text(_gpt2, {"use_cache": False}, half=False),
    "llama": _text(_llama, {"use_cache": False}, single=False),
    "vit": _image(lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, patch_size=8)), single=False),
    "convnext": _image(
        lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**STAGES)), single=False
    ),
    "segformer": _image(_segformer, half=False),
    "swin": _image(_swin, torch.rand(2, 3, 16, 16), half=False),
    "wav2vec2": Family(
        make=_wav2vec2, inputs={"input_values": torch.randn(2, 400)}, shapes={"input_values": BATCH}, half=False
    ),
    "t5": _text(_t5, {}, half=False),
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
