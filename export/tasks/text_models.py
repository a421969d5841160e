"""Text models as a server needs them: tokens in, one answer out, with pooling and normalisation in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

Pooling: TypeAlias = Literal["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens"]


class TextNetwork(nn.Module):
    """A transformers model that takes tokens and returns one of its outputs.

    Args:
        network: The model; returns a tensor, or an object that has it under `output`.
        output: The name of the exported output, such as `logits` or `last_hidden_state`.
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


class Normalized(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Vectors (batch, size)."""
        return nn.functional.normalize(vectors, dim=-1)


def pool(tokens: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """One vector for each text, as the package sentence-transformers pools.

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
