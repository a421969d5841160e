"""A tower of a model that compares pictures with texts, such as CLIP: it embeds one of the two."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn


class Tower(nn.Module):
    """One tower of a transformers model, as a network of its own.

    Args:
        towers: The model.
        takes: What the tower embeds.
    """

    def __init__(self, towers: nn.Module, takes: Literal["image", "text"]) -> None:
        super().__init__()
        self.towers, self._features = towers, f"get_{takes}_features"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Vectors (batch, size) of length 1, of what the model's `get_image_features` or `get_text_features` takes."""
        vectors: Tensor = getattr(self.towers, self._features)(*args, **kwargs).pooler_output
        return nn.functional.normalize(vectors, dim=-1)
