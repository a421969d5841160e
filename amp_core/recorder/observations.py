"""What was seen so far in the recorded steps of a run; keeps no tensor of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_core.recorder.entry import Direction, Entry, unscaled
from amp_core.recorder.running_magnitudes import DeviceMagnitudes, HostMagnitudes
from amp_core.recorder.tensor_parts import absolute_parts

_Key = tuple[str, Any, Direction, int, tuple[torch.dtype, ...], torch.dtype, torch.device, float]


@dataclass
class _Seen:
    magnitudes: HostMagnitudes | DeviceMagnitudes
    calls: int = 0


class Observations:
    """Outputs of operations, by module, operation, direction, dtypes, device and loss scale."""

    def __init__(self) -> None:
        self._seen: dict[_Key, _Seen] = {}

    def add(
        self,
        where: tuple[str, Direction],
        op: Any,
        inputs: tuple[torch.dtype, ...],
        number: int,
        output: Tensor,
        scale: float,
    ) -> None:
        """Note one output of one call.

        Args:
            where: The module's path and the direction.
            op: The operation.
            inputs: The dtypes that it was given.
            number: Which of its outputs.
            output: The output itself, of a floating or complex dtype.
            scale: What the step's loss is multiplied with.
        """
        key = (where[0], op, where[1], number, inputs, output.dtype, output.device, scale)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(HostMagnitudes() if output.is_cpu else DeviceMagnitudes())
        seen.calls += 1
        for part in absolute_parts(output):
            seen.magnitudes.add(part)

    def entries(self) -> Iterator[Entry]:
        """Yield what was seen, a key at a time; waits for the devices."""
        for key, seen in tuple(self._seen.items()):
            yield _entry(key, seen)


def _entry(key: _Key, seen: _Seen) -> Entry:
    module, op, direction, output, inputs, dtype, _, scale = key
    magnitudes, divisor = seen.magnitudes.result(), scale if direction == "backward" else 1.0
    return Entry(
        module=module,
        op=str(op),
        direction=direction,
        output=output,
        inputs=tuple(_name(given) for given in inputs),
        dtype=_name(dtype),
        calls=seen.calls,
        magnitudes=magnitudes,
        unscaled_largest=unscaled(magnitudes.largest, divisor),
        unscaled_smallest=unscaled(magnitudes.smallest, divisor),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
