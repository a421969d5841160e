"""Tasks whose models take several inputs: by name, in order, and all of them together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

HERE = "tests.amp_core.several_inputs"
LENGTH, VOCABULARY = 6, 20


class Words(Dataset[Any]):
    """Rows of word numbers, 0 behind their end; the target is whether their mean is in the upper half."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        length = self.lengths[index]
        words = self.words[index] * (torch.arange(LENGTH) < length)
        return {"words": words, "lengths": length}, (words.sum() > length * VOCABULARY / 2).long()


class InOrder(Words):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return tuple(inputs.values()), target


class Padding(Words):
    """Items of many lengths, which only its own `collate_fn` puts together."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs["words"][: inputs["lengths"]], target

    def collate_fn(self, items: list[Any]) -> Any:
        rows = nn.utils.rnn.pad_sequence([words for words, _ in items], batch_first=True)
        rows = nn.functional.pad(rows, (0, LENGTH - rows.shape[1]))
        lengths = torch.tensor([len(words) for words, _ in items])
        return {"words": rows, "lengths": lengths}, torch.stack([target for _, target in items])


class Reader(nn.Module):
    """The mean of the embeddings of the words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.choose = nn.Linear(8, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        there = (torch.arange(words.shape[1], device=words.device) < lengths[:, None])[..., None]
        embedded = self.embed(words) * there.to(self.embed.weight.dtype)
        scores: Tensor = self.choose(embedded.sum(1) / lengths[:, None].to(embedded.dtype))
        return scores


class Together(Reader):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]  # (what is tested)
        return super().forward(batch["words"], batch["lengths"])


class Padded(nn.Module):
    """Hides what is behind the end by `src_key_padding_mask`; in evaluation mode torch computes that in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.choose = nn.Linear(8, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.arange(words.shape[1], device=words.device) >= lengths[:, None]
        scores: Tensor = self.choose(self.encoder(self.embed(words), src_key_padding_mask=hidden).mean(1))
        return scores


def reader() -> nn.Module:
    return Reader()


def together() -> nn.Module:
    return Together()


def padded() -> nn.Module:
    return Padded()


def by_name() -> tuple[Words, Words]:
    return Words(64, 0), Words(20, 1)


def in_order() -> tuple[Words, Words]:
    return InOrder(64, 0), InOrder(20, 1)


def padding() -> tuple[Words, Words]:
    return Padding(64, 0), Padding(20, 1)
