"""Versions of the libraries that took part, for the certificate."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import onnx
import onnxruntime


def versions() -> dict[str, str]:
    """Versions by library: halfserve, torch where it is loaded, onnx, onnxruntime, numpy."""
    torch = {"torch": str(sys.modules["torch"].__version__)} if "torch" in sys.modules else {}
    libraries = {"onnx": str(onnx.__version__), "onnxruntime": str(onnxruntime.__version__), "numpy": str(np.__version__)}
    return {"halfserve": _own_version(), **torch, **libraries}


def _own_version() -> str:
    try:
        return version("halfserve")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
