"""From a trained PyTorch model to an fp16 ONNX artefact whose numbers are proved.

The names below are loaded when they are first used: models use the helpers of `export.dtype_check.dtype_inheritance` inside
`forward`, imported from there or from here, and that must not pull in onnx or a runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.certificate.budget import Budget
    from export.certificate.certificate import BudgetExceeded, Certificate, read_certificate
    from export.certificate.embed import check_embedded, embed
    from export.certificate.html import certificate_page
    from export.dtype_check.dtype_inheritance import (
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
    from export.dtype_check.finder import find_dtype_leaks
    from export.dtype_check.inherit_dtype import inherit_dtype
    from export.errors import ExportError
    from export.half_module.to_half import to_half
    from export.module_pipeline import export_module
    from export.onnx_fp16.convert import convert_file, convert_float_to_float16
    from export.placement.audit import audit_placement
    from export.placement.cuda_kernels import predict_cuda
    from export.repository.version_writer import write_model_version
    from export.search.smallest_fp32_set import find_fp32_nodes
    from export.to_onnx.export_onnx import export_onnx
    from export.verification.verify import verify

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Certificate",
    "ExportError",
    "audit_placement",
    "causal_mask",
    "certificate_page",
    "check_embedded",
    "convert_file",
    "convert_float_to_float16",
    "embed",
    "export_module",
    "export_onnx",
    "find_dtype_leaks",
    "find_fp32_nodes",
    "finfo",
    "inherit_dtype",
    "mask_value",
    "new_arange",
    "new_empty",
    "new_eye",
    "new_full",
    "new_linspace",
    "new_ones",
    "new_tensor",
    "new_zeros",
    "predict_cuda",
    "read_certificate",
    "to_half",
    "verify",
    "write_model_version",
]

_HOMES = {
    "certificate.budget": {"Budget"},
    "certificate.certificate": {"BudgetExceeded", "Certificate", "read_certificate"},
    "certificate.embed": {"check_embedded", "embed"},
    "certificate.html": {"certificate_page"},
    "errors": {"ExportError"},
    "module_pipeline": {"export_module"},
    "half_module.to_half": {"to_half"},
    "dtype_check.inherit_dtype": {"inherit_dtype"},
    "dtype_check.finder": {"find_dtype_leaks"},
    "onnx_fp16.convert": {"convert_float_to_float16"},
    "onnx_fp16.convert": {"convert_file"},
    "placement.audit": {"audit_placement"},
    "placement.cuda_kernels": {"predict_cuda"},
    "repository.version_writer": {"write_model_version"},
    "search.smallest_fp32_set": {"find_fp32_nodes"},
    "to_onnx.export_onnx": {"export_onnx"},
    "verification.verify": {"verify"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "dtype_check.dtype_inheritance")
    return getattr(import_module(f"{__name__}.{home}"), name)
