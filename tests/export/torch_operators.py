"""Torch's table of how its operators are written in ONNX, made once instead of for every export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import pytest


@contextmanager
def made_once() -> Iterator[None]:
    """Have `torch.onnx.export` take a copy of a table that is made on first use.

    It parses the sources of some five hundred functions for a table, which takes longer than the export of a small model.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415  (slow, and few tests export)

    make: Any = ONNXRegistry.from_torchlib
    table = cache(make)

    def copied(**version: int) -> Any:
        # An export adds translations of its own to the lists, and leaves what they hold as it is.
        fresh = copy(table(**version))
        fresh.functions = {operator: [*translations] for operator, translations in fresh.functions.items()}
        return fresh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield
