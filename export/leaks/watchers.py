"""What is watched in the float32 run and in the float16 run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from export.leaks import recovery
from export.leaks.constants import Constants
from export.leaks.finding import Severity
from export.leaks.log import Log
from export.leaks.operation import HALF, Operation, results_of
from export.leaks.overflow import Overflow
from export.leaks.places import Place, Whereabouts
from export.leaks.positions import Positions
from export.leaks.provenance import Provenance
from export.leaks.regions import autocast_region
from export.leaks.squares import Squares

LEAVES_TORCH: dict[str, tuple[Severity, str]] = {
    "numpy": ("warning", "leaves torch: an exported graph keeps the example's values as constants"),
    "__array__": ("warning", "leaves torch: an exported graph keeps the example's values as constants"),
    "tolist": ("note", "leaves torch: what is made of these numbers again is float32, and fixed in an exported graph"),
    "item": ("note", "leaves torch: what is made of this number again is float32, and fixed in an exported graph"),
    "__float__": ("note", "leaves torch: what is made of this number again is float32, and fixed in an exported graph"),
}


@dataclass
class ReferenceWatcher:
    """Carries the float32 run out, and notes where infinities are none of float16's doing."""

    overflow: Overflow = field(default_factory=Overflow)

    def call(self, operation: Operation) -> Any:
        """Make the call."""
        return operation.func(*operation.args, **operation.kwargs)

    def operate(self, operation: Operation) -> Any:
        """Run the operation, and look at its result."""
        self.overflow.before(operation)
        result = operation.func(*operation.args, **operation.kwargs)
        self.overflow.after(operation, result)
        return result


class HalfWatcher:
    """Carries the float16 run out, past the operations that fail.

    Attributes:
        provenance: The wide tensors and where they came from.
        recovered: Whether some operation failed and was repeated in its mended form.
        dtypes: The floating dtypes other than float16 that each of the user's lines made, by itself or in what it called.
    """

    def __init__(self, log: Log, expected: set[Place | None], whereabouts: Whereabouts) -> None:
        self.log = log
        self.whereabouts = whereabouts
        self.provenance = Provenance()
        self.recovered = False
        self.dtypes: dict[Place, set[torch.dtype]] = defaultdict(set)
        self.overflow = Overflow(log, expected)
        self.constants = Constants(log)
        self.followers = (Positions(log), Squares(log))

    def call(self, operation: Operation) -> Any:
        """Make the call; where it mixes dtypes and fails before it comes down to operations, make it in float16."""
        self._look(operation)
        try:
            result = operation.func(*operation.args, **operation.kwargs)
            self.provenance.after_call(operation, result)
            return result
        except RuntimeError as error:
            if not recovery.mixes(operation.args, operation.kwargs):
                raise
            try:
                result = recovery.with_half(operation.func, operation.args, operation.kwargs)
            except (RuntimeError, TypeError):
                raise error from None
            self.recovered = True
            self.provenance.refused(operation, error)
            return result

    def operate(self, operation: Operation) -> Any:
        """Run the operation, and have everyone look at it."""
        beyond = self.constants.before(operation)
        self.overflow.before(operation)
        try:
            result = operation.func(*operation.args, **operation.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            result = self._recovered(operation, error, beyond=beyond)
        self.provenance.after(operation, result)
        if numbers := self.constants.beyond_wide(operation):
            self.provenance.wrote(operation, result, numbers)
        self.constants.after(operation, result)
        self.overflow.after(operation, result, excused=beyond)
        for follower in self.followers:
            follower.after(operation, result)
        self._remember(result)
        return result

    def _recovered(self, operation: Operation, error: Exception, *, beyond: bool) -> Any:
        self.recovered = True
        parts = (operation.func, operation.args, operation.kwargs)
        try:
            if recovery.mixes(operation.args, operation.kwargs):
                result = recovery.with_half(*parts)
                self.provenance.refused(operation, error)
                return result
            if beyond:
                return recovery.with_bounded_numbers(*parts)
            if recovery.lacks_kernel(error):
                return recovery.with_float32(*parts)
        except (RuntimeError, NotImplementedError, TypeError):
            raise error from None
        raise error

    def _look(self, operation: Operation) -> None:
        place = operation.place  # asked for at every call: lines that are never asked for did not run
        name = getattr(operation.func, "__name__", "")
        source = operation.args[0] if operation.args else None
        if name in LEAVES_TORCH and isinstance(source, torch.Tensor) and source.is_floating_point() and place:
            severity, text = LEAVES_TORCH[name]
            self.log.add("round_trip", severity, place, operation.module, f".{name}() {text}", "torch")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            around = map(autocast_region, self.whereabouts.callers())
            region = next((found for found in around if found is not None), place)  # none for a decorator
            text = "autocast inside forward chooses dtypes anew at every operation, and a float16 graph keeps its casts"
            self.log.add("autocast", "warning", region, operation.writer, text, "to_half")

    def _remember(self, result: Any) -> None:
        made = {tensor.dtype for tensor in results_of(result) if tensor.is_floating_point()}
        if made - {HALF}:
            for place in self.whereabouts.callers():
                self.dtypes[place] |= made
