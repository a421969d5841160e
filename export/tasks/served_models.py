"""Models as a server needs them: tokens, pixels or a clip in, one answer out, with all preparation in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from halfserve.export.export_errors import ExportError
from halfserve.protos.pictures import PicturePreparation

Pooling: TypeAlias = Literal["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens"]


class TextNetwork(nn.Module):
    """A transformers model that takes tokens and returns one of its outputs.

    The network returns a tensor, or an object that has it under `output`, such as `logits` or `last_hidden_state`.
    """

    def __init__(self, network: nn.Module, output: str) -> None:
        super().__init__()
        self.network, self._output = network, output

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Answers of shape (batch, ...) to token ids (batch, length), int64; the mask is 1 where a token counts."""
        return {self._output: self._answer(input_ids, attention_mask, token_type_ids)}

    def _answer(self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> Tensor:
        given: dict[str, Any] = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        answer = self.network(input_ids=input_ids, **{name: value for name, value in given.items() if value is not None})
        tensor: Tensor = answer if isinstance(answer, Tensor) else getattr(answer, self._output)
        return tensor


class Embedder(TextNetwork):
    """Token vectors, pooled to one vector for each text, through further layers.

    Args:
        network: The transformers model.
        poolings: How tokens are pooled; the results of several are joined.
        layers: Applied to the pooled vector, such as a dense layer or `Normalized`.
    """

    def __init__(self, network: nn.Module, poolings: Sequence[Pooling], layers: Sequence[nn.Module]) -> None:
        super().__init__(network, "last_hidden_state")
        self._poolings = tuple(poolings)
        self.layers = nn.Sequential(*layers)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Embeddings (batch, size) of token ids (batch, length), int64; the mask is 1 where a token counts."""
        tokens = self._answer(input_ids, attention_mask, token_type_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = [pool(tokens, mask, how) for how in self._poolings]
        return {"embedding": self.layers(torch.cat(pooled, dim=-1) if len(pooled) > 1 else pooled[0])}


class SparseEmbedder(TextNetwork):
    """A weight for each entry of the vocabulary, as SPLADE pools the logits of a masked language model.

    https://arxiv.org/abs/2109.10086
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, "logits")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Weights (batch, vocabulary), at least 0, of token ids (batch, length), int64; the mask is 1 where a token counts.

        The logarithm of the largest logit is the largest logarithm, so that it is computed for one position alone.
        """
        weights = torch.relu(self._answer(input_ids, attention_mask, token_type_ids))
        if attention_mask is not None:
            weights = weights * attention_mask.unsqueeze(-1).to(weights.dtype)
        return {"embedding": torch.log1p(weights.amax(dim=1))}


class Normalized(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Vectors (batch, size)."""
        return nn.functional.normalize(vectors, dim=-1)


def pool(tokens: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """Return one vector for each text, as the package sentence-transformers pools.

    Args:
        tokens: Vectors of tokens, (batch, length, size).
        mask: Whole numbers, (batch, length), 1 where a token counts.
        how: `cls`: the first token; `lasttoken`: the last that counts; `max`, `mean`: of the tokens that count;
            `mean_sqrt_len_tokens`: their sum, divided by the square root of their number.

    Returns:
        (batch, size).
    """
    if how == "cls":
        return tokens[:, 0]
    if how == "lasttoken":
        places = torch.arange(mask.shape[1], device=mask.device)
        last = (mask * places).argmax(dim=1)
        return tokens.gather(1, last[:, None, None].expand(-1, 1, tokens.shape[-1])).squeeze(1)
    counted = mask.unsqueeze(-1).to(tokens.dtype)
    if how == "max":
        return tokens.masked_fill(counted == 0, torch.finfo(torch.float16).min).amax(dim=1)
    count = counted.sum(dim=1, keepdim=True).clamp(min=1)
    # Divided before the sum, which then stays in float16's range for texts of any length.
    return (tokens * (counted / (count if how == "mean" else count.sqrt()))).sum(dim=1)


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

    The network returns an object that has `pooler_output`, (batch, size) or (batch, size, 1, 1).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Vectors (batch, size) of length 1, of images (batch, 3, height, width)."""
        return nn.functional.normalize(self.network(pixel_values).pooler_output.flatten(1), dim=-1)


class ImageModel(nn.Module):
    """A network with its preprocessing in front; the exported output is called `output`.

    The network takes normalised images (batch, 3, height, width), and returns a tensor, or an object that has it under
    `output`.
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


# As Wav2Vec2FeatureExtractor of transformers has it; for clips of silence.
EPSILON = 1e-7


class AudioModel(nn.Module):
    """A transformers model of raw audio; if `is_normalised`, each clip gets mean 0 and variance 1 first.

    The network takes values (batch, values), and returns an object with `logits`.
    """

    def __init__(self, network: nn.Module, *, is_normalised: bool) -> None:
        super().__init__()
        self.network, self._is_normalised = network, is_normalised

    def forward(self, audio: Tensor) -> dict[str, Tensor]:
        """Logits (batch, classes), or (batch, time steps, tokens), of clips (batch, values), float32 from -1 to 1."""
        if self._is_normalised:
            centred = audio - audio.mean(dim=-1, keepdim=True)
            audio = centred / (centred.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()
        logits: Tensor = self.network(audio).logits
        return {"logits": logits}


class Tower(nn.Module):
    """One tower of a model that compares pictures with texts, such as CLIP, as a network that embeds one of the two."""

    def __init__(self, towers: nn.Module, takes: Literal["image", "text"]) -> None:
        super().__init__()
        self.towers, self._features = towers, f"get_{takes}_features"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Vectors (batch, size) of length 1, of what the model's `get_image_features` or `get_text_features` takes."""
        vectors: Tensor = getattr(self.towers, self._features)(*args, **kwargs).pooler_output
        return nn.functional.normalize(vectors, dim=-1)
