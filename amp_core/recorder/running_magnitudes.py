"""Magnitudes that grow tensor by tensor and keep none of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_core.recorder.fp16_limits import LARGEST, SMALLEST_NORMAL, SMALLEST_SUBNORMAL
from amp_core.recorder.magnitudes import Magnitudes


class HostMagnitudes:
    """For tensors on the CPU: the extremes are read at once.

    Most counts follow from them, so that numbers which are all in float16's normal range cost one reduction.
    """

    def __init__(self) -> None:
        self._elements = self._non_finite = self._zeros = self._overflow = self._underflow = self._subnormal = 0
        self._largest, self._smallest = 0.0, math.inf

    def add(self, magnitudes: Tensor) -> None:
        """Take magnitudes into account: float32 or float64, at least one element."""
        self._elements += magnitudes.numel()
        low, high = _extremes(magnitudes)
        if not math.isfinite(high):
            finite = magnitudes[magnitudes <= torch.finfo(magnitudes.dtype).max]
            self._non_finite += magnitudes.numel() - finite.numel()
            if not finite.numel():
                return
            magnitudes = finite
            low, high = _extremes(magnitudes)
        self._add_finite(magnitudes, low, high)

    def _add_finite(self, magnitudes: Tensor, low: float, high: float) -> None:
        zeros = 0
        if low == 0:
            zeros = magnitudes.numel() - int(magnitudes.count_nonzero())
            self._zeros += zeros
            if high == 0:
                return
            low = torch.where(magnitudes == 0, math.inf, magnitudes).amin().item()
        self._smallest, self._largest = min(self._smallest, low), max(self._largest, high)
        if high > LARGEST:
            self._overflow += int((magnitudes > LARGEST).count_nonzero())
        if low < SMALLEST_NORMAL:
            below_normal = int((magnitudes < SMALLEST_NORMAL).count_nonzero()) - zeros
            below_all = int((magnitudes < SMALLEST_SUBNORMAL).count_nonzero()) - zeros if low < SMALLEST_SUBNORMAL else 0
            self._underflow += below_all
            self._subnormal += below_normal - below_all

    def result(self) -> Magnitudes:
        """Everything so far."""
        return Magnitudes(
            elements=self._elements,
            non_finite=self._non_finite,
            zeros=self._zeros,
            overflow=self._overflow,
            underflow=self._underflow,
            subnormal=self._subnormal,
            largest=self._largest or None,
            smallest=self._smallest if self._largest else None,
        )


class DeviceMagnitudes:
    """For tensors on an accelerator: everything is added up there, and the host waits for nothing before `result`."""

    def __init__(self) -> None:
        self._elements = 0
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, magnitudes: Tensor) -> None:
        """Take magnitudes into account: float32 or float64, at least one element, all on one device."""
        self._elements += magnitudes.numel()
        high = torch.where(magnitudes <= torch.finfo(magnitudes.dtype).max, magnitudes, 0)
        low = torch.where(high > 0, high, math.inf)
        classes = (~magnitudes.isfinite(), high > 0, high > LARGEST, low < SMALLEST_NORMAL, low < SMALLEST_SUBNORMAL)
        counts = torch.stack([which.sum() for which in classes])
        extremes = torch.stack([high.amax(), -low.amin()])
        if self._sums is not None:
            counts, extremes = self._sums[0] + counts, torch.maximum(self._sums[1], extremes)
        self._sums = (counts, extremes)

    def result(self) -> Magnitudes:
        """Everything so far."""
        if self._sums is None:
            return Magnitudes()
        non_finite, non_zero, overflow, below_normal, below_all = (int(count) for count in self._sums[0].tolist())
        largest, smallest = self._sums[1].tolist()
        return Magnitudes(
            elements=self._elements,
            non_finite=non_finite,
            zeros=self._elements - non_finite - non_zero,
            overflow=overflow,
            underflow=below_all,
            subnormal=below_normal - below_all,
            largest=largest if non_zero else None,
            smallest=-smallest if non_zero else None,
        )


def _extremes(magnitudes: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(magnitudes)
    return low.item(), high.item()
