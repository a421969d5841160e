"""From a trained PyTorch model to an fp16 ONNX artefact whose numbers are proved.

The names below are loaded when they are first used: models import `export.dtype_inheritance` (or its helpers from here) inside
`forward`, and that must not pull in onnx or a runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.budget import Budget
    from export.certificate import BudgetExceeded, Certificate, read_certificate
    from export.dtype_inheritance import (
        causal_mask,
        finfo,
        mask_value,
        new_arange,
        new_empty,
        new_eye,
        new_full,
        new_linspace,
        new_ones,
        new_tensor,
        new_zeros,
    )
    from export.errors import ExportError
    from export.half import to_half
    from export.model_version_writer import write_model_version
    from export.onnx_export import export_onnx
    from export.verification import verify

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Certificate",
    "ExportError",
    "causal_mask",
    "export_onnx",
    "finfo",
    "mask_value",
    "new_arange",
    "new_empty",
    "new_eye",
    "new_full",
    "new_linspace",
    "new_ones",
    "new_tensor",
    "new_zeros",
    "read_certificate",
    "to_half",
    "verify",
    "write_model_version",
]

_HOMES = {
    "budget": {"Budget"},
    "certificate": {"BudgetExceeded", "Certificate", "read_certificate"},
    "errors": {"ExportError"},
    "half": {"to_half"},
    "model_version_writer": {"write_model_version"},
    "onnx_export": {"export_onnx"},
    "verification": {"verify"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "dtype_inheritance")
    return getattr(import_module(f"export.{home}"), name)
