"""Compares the error that the rounding simulation predicts for a half-precision model with a device's actual error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from halfserve.export.half_types import FP16, HalfType
from halfserve.export.verification.simulation import round_every_node
from tests.export.conversions.cases import Case, Value
from tests.export.conversions.runtime import Session


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one model relative to the reference's largest magnitude; infinite if only one side is finite."""

    predicted: float  # the error of the simulation
    found: float  # the error on the device
    rounding: float = 2.0**-FP16.significant_bits  # the error of one rounding of the largest magnitude

    @property
    def ratio(self) -> float:
        """The found error divided by the predicted one, which is at least one rounding."""
        if math.isinf(self.predicted):
            return float(math.isinf(self.found))
        return self.found / max(self.predicted, self.rounding)


class Device(Protocol):
    """A converted model on a device."""

    def run(self, inputs: dict[str, Value], /) -> list[Value]:
        """Return the outputs in order."""
        ...


def errors_of(case: Case, converted: onnx.ModelProto, device: Device, half: HalfType = FP16, *, cuda: bool = False) -> Errors:
    """Return the simulation's and the device's errors relative to the answers of float32, over all inputs of a case.

    `cuda`: whether what CUDA's kernels round inside is simulated too.
    """
    reference = Session(case.model)
    simulated = Session(round_every_node(converted, half, cuda=cuda).SerializeToString(), "ORT_DISABLE_ALL")
    predicted = found = 0.0
    with np.errstate(over="ignore"):  # inputs beyond the half type's range
        for inputs in case.inputs:
            wanted = reference.run(inputs)
            predicted = max(predicted, *(error_of(*pair, half) for pair in zip(wanted, simulated.run(inputs), strict=True)))
            found = max(found, *(error_of(*pair, half) for pair in zip(wanted, device.run(inputs), strict=True)))
    return Errors(predicted=predicted, found=found, rounding=2.0**-half.significant_bits)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Accuracy of the predicted errors of several models."""

    number: int  # the number of models
    within: float  # share of the models whose error is at most the predicted one
    within_twice: float  # share of the models whose error is at most twice the predicted one
    median: float  # the median of the ratios of found to predicted errors
    percentile_95: float  # the 95th percentile of these ratios
    worst: tuple[tuple[str, float], ...]  # names and ratios of the models, largest ratio first

    @classmethod
    def of(cls, ratios: Mapping[str, float]) -> Agreement:
        """Compute the agreement of one or more models from their ratios by name."""
        ordered = sorted(ratios.items(), key=lambda item: -item[1])
        found = [ratio for _, ratio in reversed(ordered)]
        within, within_twice = (sum(ratio <= bound for ratio in found) / len(found) for bound in (1, 2))
        median, percentile_95 = (found[min(len(found) - 1, int(part * len(found)))] for part in (0.5, 0.95))
        return cls(
            number=len(found),
            within=within,
            within_twice=within_twice,
            median=median,
            percentile_95=percentile_95,
            worst=tuple(ordered),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Number, shares, median, 95th percentile and largest ratio, for a table."""
        shares, places = (self.within, self.within_twice), (self.median, self.percentile_95, self.worst[0][1])
        return (str(self.number), *(f"{share:.1%}" for share in shares), *(f"{place:.2f}" for place in places))


def error_of(wanted: Value, answer: Value, half: HalfType = FP16) -> float:
    """Return the largest difference from a float32 answer, relative to its largest finite magnitude; 0 for non-floating
    answers.
    """
    if isinstance(wanted, list) and isinstance(answer, list):
        return max((error_of(one, other, half) for one, other in zip(wanted, answer, strict=True)), default=0.0)
    if not isinstance(wanted, np.ndarray) or not np.issubdtype(wanted.dtype, np.floating):
        return 0.0
    exact, other = wanted.astype(np.float64), np.asarray(answer).astype(np.float64)
    finite = np.isfinite(exact)
    if exact.shape != other.shape or not np.array_equal(finite, np.isfinite(other)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(other[finite] - exact[finite]).max() / max(np.abs(exact[finite]).max(), half.smallest_normal))
