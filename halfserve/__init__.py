"""Train PyTorch models in mixed precision, convert them to fp16 with proof, serve them over gRPC in batches.

Each name below is loaded when it is first used: `import halfserve` alone imports no torch, onnx, onnxruntime or grpc.
Names from `amp_core` need the extra `train`, names from `export` the extra `export`, the client's none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfserve.amp_core.autocast.autocast import autocast, custom_bwd, custom_fwd
    from halfserve.amp_core.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
    from halfserve.amp_core.data.data_errors import DataError
    from halfserve.amp_core.data.tar_shards import tar_shards
    from halfserve.amp_core.factory import FactoryError
    from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler
    from halfserve.amp_core.policy.operations import Rule
    from halfserve.amp_core.policy.policy import Policy, PolicyError
    from halfserve.amp_core.recorder.recorder import Recorder
    from halfserve.amp_core.training.training_settings import TrainingError
    from halfserve.export.certificate.budget import Budget
    from halfserve.export.certificate.certificate import BudgetExceeded, Certificate, read_certificate
    from halfserve.export.certificate.embed import check_embedded, embed
    from halfserve.export.certificate.html import certificate_page
    from halfserve.export.dtype_check.dtype_inheritance import (
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
    from halfserve.export.dtype_check.finder import find_dtype_leaks
    from halfserve.export.dtype_check.inherit_dtype import inherit_dtype
    from halfserve.export.export_errors import ExportError
    from halfserve.export.file_conversion import convert
    from halfserve.export.half_module.to_half import to_half
    from halfserve.export.module_pipeline import export_module
    from halfserve.export.onnx_fp16.convert import convert_file, convert_float_to_float16
    from halfserve.export.placement.audit import audit_placement
    from halfserve.export.placement.cuda_kernels import predict_cuda
    from halfserve.export.repository.version_writer import write_model_version
    from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
    from halfserve.export.to_onnx.export_onnx import export_onnx
    from halfserve.export.verification.verify import verify
    from halfserve.serve.client.array_conversion import Class, classes_of
    from halfserve.serve.client.async_client import AsyncClient, AsyncModelHandle
    from halfserve.serve.client.channel_settings import Tls
    from halfserve.serve.client.client import Client, ModelHandle
    from halfserve.serve.client.errors import (
        AccessDenied,
        AlreadyExists,
        Cancelled,
        ClientError,
        DeadlineExceeded,
        InvalidRequest,
        ModelNotFound,
        Overloaded,
        ServerUnavailable,
        Unsupported,
    )
    from halfserve.serve.client.exchange import RetryPolicy
    from halfserve.serve.client.infer_messages import InferAnswer
    from halfserve.serve.client.model_handles import BoundModel, TensorInfo
    from halfserve.serve.client.shared_regions import SharedRegion
    from halfserve.serve.client.streaming import StreamAnswer

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "AsyncClient",
    "AsyncModelHandle",
    "BoundModel",
    "Budget",
    "BudgetExceeded",
    "Cancelled",
    "Certificate",
    "CheckpointError",
    "Class",
    "Client",
    "ClientError",
    "DataError",
    "DeadlineExceeded",
    "ExportError",
    "FactoryError",
    "GradScaler",
    "InferAnswer",
    "InvalidRequest",
    "ModelHandle",
    "ModelNotFound",
    "Overloaded",
    "Policy",
    "PolicyError",
    "Recorder",
    "RetryPolicy",
    "Rule",
    "ServerUnavailable",
    "SharedRegion",
    "StreamAnswer",
    "TensorInfo",
    "Tls",
    "TrainingError",
    "Unsupported",
    "audit_placement",
    "autocast",
    "causal_mask",
    "certificate_page",
    "check_embedded",
    "classes_of",
    "convert",
    "convert_file",
    "convert_float_to_float16",
    "custom_bwd",
    "custom_fwd",
    "embed",
    "export_module",
    "export_onnx",
    "find_dtype_leaks",
    "find_fp32_nodes",
    "finfo",
    "inherit_dtype",
    "load_checkpoint",
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
    "save_checkpoint",
    "tar_shards",
    "to_half",
    "verify",
    "write_model_version",
]

_NAMES_BY_MODULE = {
    "amp_core.autocast.autocast": ("autocast", "custom_bwd", "custom_fwd"),
    "amp_core.checkpoint": ("CheckpointError", "load_checkpoint", "save_checkpoint"),
    "amp_core.data.data_errors": ("DataError",),
    "amp_core.data.tar_shards": ("tar_shards",),
    "amp_core.factory": ("FactoryError",),
    "amp_core.grad_scaler.grad_scaler": ("GradScaler",),
    "amp_core.policy.operations": ("Rule",),
    "amp_core.policy.policy": ("Policy", "PolicyError"),
    "amp_core.recorder.recorder": ("Recorder",),
    "amp_core.training.training_settings": ("TrainingError",),
    "export.certificate.budget": ("Budget",),
    "export.certificate.certificate": ("BudgetExceeded", "Certificate", "read_certificate"),
    "export.certificate.embed": ("check_embedded", "embed"),
    "export.certificate.html": ("certificate_page",),
    "export.dtype_check.dtype_inheritance": (
        "causal_mask",
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
    ),
    "export.dtype_check.finder": ("find_dtype_leaks",),
    "export.dtype_check.inherit_dtype": ("inherit_dtype",),
    "export.export_errors": ("ExportError",),
    "export.file_conversion": ("convert",),
    "export.half_module.to_half": ("to_half",),
    "export.module_pipeline": ("export_module",),
    "export.onnx_fp16.convert": ("convert_file", "convert_float_to_float16"),
    "export.placement.audit": ("audit_placement",),
    "export.placement.cuda_kernels": ("predict_cuda",),
    "export.repository.version_writer": ("write_model_version",),
    "export.search.smallest_fp32_set": ("find_fp32_nodes",),
    "export.to_onnx.export_onnx": ("export_onnx",),
    "export.verification.verify": ("verify",),
    "serve.client.async_client": ("AsyncClient", "AsyncModelHandle"),
    "serve.client.client": ("Client", "ModelHandle"),
    "serve.client.channel_settings": ("Tls",),
    "serve.client.errors": (
        "AccessDenied",
        "AlreadyExists",
        "Cancelled",
        "ClientError",
        "DeadlineExceeded",
        "InvalidRequest",
        "ModelNotFound",
        "Overloaded",
        "ServerUnavailable",
        "Unsupported",
    ),
    "serve.client.exchange": ("RetryPolicy",),
    "serve.client.infer_messages": ("InferAnswer",),
    "serve.client.model_handles": ("BoundModel", "TensorInfo"),
    "serve.client.shared_regions": ("SharedRegion",),
    "serve.client.streaming": ("StreamAnswer",),
    "serve.client.array_conversion": ("Class", "classes_of"),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'halfserve' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"halfserve.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
