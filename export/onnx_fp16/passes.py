"""Runs repairs one after the other, each between its two checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import onnx_ir

from export.errors import ExportError
from export.onnx_fp16.report import Repair


class RepairPass(Protocol):
    """A rewrite of a float32 model that changes no result.

    Attributes:
        name: What reports and errors call it.
    """

    name: str

    def requires(self, model: onnx_ir.Model) -> None:
        """Raise an exception where the model is not what the pass works on."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Rewrite the model in place; empty where nothing was changed."""

    def ensures(self, model: onnx_ir.Model) -> None:
        """Raise an exception where the model is not as the pass should leave it."""


class PassError(ExportError):
    """A repair failed. That is a fault of this program, not of the model; the text says how to do without repairs."""


def run_passes(model: onnx_ir.Model, passes: Sequence[RepairPass]) -> tuple[Repair, ...]:
    """Run passes in their order.

    Returns:
        Everything that they changed; empty where that is nothing.

    Raises:
        PassError: A pass, or one of its checks, failed; the text names the pass, the step and the passes before it.
    """
    repairs: list[Repair] = []
    for index, current in enumerate(passes):
        step = "requires"
        try:
            current.requires(model)
            step = "call"
            repairs += current.call(model)
            step = "ensures"
            current.ensures(model)
        except ExportError:
            raise
        except Exception as error:
            before = ", ".join(earlier.name for earlier in passes[:index]) or "none"
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PassError(
                f"the repair {current.name!r} failed in `{step}` ({text}); passes before it: {before}; "
                "convert without repairs, and report this with the model"
            ) from error
    return tuple(repairs)
