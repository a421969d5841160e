"""Rows of float16 logits, and masks that fit them."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

untimed = settings(deadline=None)  # the first example pays for what torch loads late
LARGEST = torch.finfo(torch.float16).max
finite = st.floats(-LARGEST, LARGEST, width=16)
# Half of the rows have logits as they are in practice, half any that there are.
rows = st.lists(finite, min_size=1, max_size=40) | st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=40)


def tensor(row: list[float]) -> Tensor:
    """A row as float16 of shape (1, n)."""
    return torch.tensor([row], dtype=torch.float16)


@st.composite
def masked_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits and a mask, both of shape (1, n); all may be masked."""
    row = draw(rows)
    mask = draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    return tensor(row), torch.tensor([mask])
