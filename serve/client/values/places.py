"""Where tensors lie in shared memory, as requests and answers say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve.client.values.tensors import Array

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The bytes of one tensor.

    Attributes:
        region: the name that the region is registered by.
        offset: from the region's start, in bytes.
        byte_size: of the tensor, or of the room for it.
    """

    region: str
    offset: int
    byte_size: int

    def write_to(self, parameters: Any) -> None:
        """Say it in a tensor's map of InferParameter."""
        parameters[REGION].string_param = self.region
        parameters[SIZE].int64_param = self.byte_size
        if self.offset:
            parameters[OFFSET].int64_param = self.offset


# Finds the place of an input that lies in shared memory; None for one that is to be sent.
FindPlace = Callable[[str, Array], Place | None]
