"""From a trained PyTorch model to an fp16 ONNX artefact whose numbers are proved.

The names below are loaded when they are first used: models import `export.dtype_inheritance` (or its helpers from here) inside
`forward`, and that must not pull in onnx or a runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.certificate.certificate import BudgetExceeded, Certificate, read_certificate
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
    from export.halving.to_half import to_half
    from export.repository.model_version_writer import write_model_version
    from export.to_onnx.export_onnx import export_onnx
    from export.verification.budget import Budget
    from export.verification.verify import verify

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
    "certificate.certificate": {"BudgetExceeded", "Certificate", "read_certificate"},
    "errors": {"ExportError"},
    "halving.to_half": {"to_half"},
    "repository.model_version_writer": {"write_model_version"},
    "to_onnx.export_onnx": {"export_onnx"},
    "verification.budget": {"Budget"},
    "verification.verify": {"verify"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "dtype_inheritance")
    return getattr(import_module(f"export.{home}"), name)
