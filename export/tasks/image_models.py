"""Image models as a server needs them: bytes of pixels in, with scaling, normalisation and transposition in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfserve.export.export_errors import ExportError
from halfserve.protos.pictures import PicturePreparation


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Steps that turn an image into the network's input.

    Attributes:
        height: Height of the network's images, in pixels.
        width: Width of the network's images, in pixels.
        scale: Factor of a pixel's value, which is 0 to 255.
        mean: Mean of each colour, subtracted from the scaled values.
        std: Standard deviation of each colour; the values are divided by it last.
        is_bgr: Whether the network takes blue first.
        pictures: How a picture of any size becomes one of the network's; None where that is not known.
    """

    height: int
    width: int
    scale: float = 1 / 255
    mean: Sequence[float] = (0.0, 0.0, 0.0)
    std: Sequence[float] = (1.0, 1.0, 1.0)
    is_bgr: bool = False
    pictures: PicturePreparation | None = None

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3:
            raise ExportError(f"the model's images are normalised in {len(self.mean)} colours; expected 3, of RGB images")

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any], config: Any) -> Preprocessing:
        """Read a preprocessor_config.json.

        Args:
            content: The file's content.
            config: The model's configuration, whose `image_size` is the size where the file has none.

        Raises:
            ExportError: The images' size is not known, or is not of three colours.
            AttributeError, TypeError, ValueError: The content is not as transformers writes it.
        """
        size = (content.get("do_center_crop", True) and content.get("crop_size")) or content.get("size")
        size = size or getattr(config, "image_size", None)
        if isinstance(size, Mapping):
            edge = size.get("shortest_edge")
            height, width = size.get("height", edge), size.get("width", edge)
        elif isinstance(size, list | tuple) and len(size) == 2:
            height, width = size
        else:
            height = width = size
        if not isinstance(height, int) or not isinstance(width, int):
            raise ExportError(f"preprocessor_config.json has no size of images: {size!r}; expected height and width")
        normal = content.get("do_normalize", True)
        mean, std = (content.get(name) if normal else None for name in ("image_mean", "image_std"))
        # The head of an EfficientNet, its top, takes images that are divided twice.
        times = 2 if content.get("include_top") else 1
        return cls(
            height=height,
            width=width,
            scale=float(content.get("rescale_factor", 1 / 255)) if content.get("do_rescale", True) else 1.0,
            mean=tuple(map(float, mean or (0.0, 0.0, 0.0))),
            std=tuple(float(value) ** times for value in std or (1.0, 1.0, 1.0)),
            is_bgr=bool(content.get("do_flip_channel_order")),
        )


class PooledImage(nn.Module):
    """A body of pictures alone, such as DINOv2, as a network that embeds.

    Args:
        network: Returns an object that has `pooler_output`, (batch, size) or (batch, size, 1, 1).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Vectors (batch, size) of length 1, of images (batch, 3, height, width)."""
        return nn.functional.normalize(self.network(pixel_values).pooler_output.flatten(1), dim=-1)


class ImageModel(nn.Module):
    """A network with its preprocessing in front.

    Args:
        network: Takes images (batch, 3, height, width), normalised; returns a tensor, or an object that has it under `output`.
        preprocessing: What happens to the pixels first.
        output: The name of the exported output.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, output: str = "logits") -> None:
        super().__init__()
        self.network, self._output = network, output
        std = torch.tensor(preprocessing.std, dtype=torch.float64)
        self._is_bgr = preprocessing.is_bgr
        # One multiplication and one addition: a pixel of 0 to 255 is exact in float16, and so is nothing else here.
        self.register_buffer("factor", (preprocessing.scale / std).float())
        self.register_buffer("offset", (-torch.tensor(preprocessing.mean, dtype=torch.float64) / std).float())

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Answers (batch, ...), such as logits, to RGB images (batch, height, width, 3), uint8."""
        pixels = image.to(self.factor.dtype) * self.factor + self.offset
        if self._is_bgr:
            pixels = pixels.flip(-1)
        answer = self.network(pixels.permute(0, 3, 1, 2))
        return {self._output: answer if isinstance(answer, Tensor) else getattr(answer, self._output)}
