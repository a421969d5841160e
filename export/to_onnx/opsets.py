"""Which versions of ONNX's operators a model can be exported in."""

from __future__ import annotations

import onnx

from export.errors import ExportError

# torch's own translations are written in 18; onnxscript converts upwards to 25, which ONNX Runtime 1.27 and later runs.
# Downwards the conversion is ONNX's old one, which drops metadata and fails silently on what it does not know.
OLDEST, NEWEST = 18, 25


def require_opset(version: int | None) -> None:
    """Check a wanted version of the default domain; None is torch's own choice.

    Raises:
        ExportError: It is too old or too new.
    """
    newest = min(NEWEST, onnx.defs.onnx_opset_version())
    if version is not None and (not isinstance(version, int) or not OLDEST <= version <= newest):
        raise ExportError(f"opset_version is {version}; expected a whole number from {OLDEST} to {newest}, or None")
