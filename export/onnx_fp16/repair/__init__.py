"""Repairs: rewrites of a float32 graph, equal in exact arithmetic, that half precision can hold."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.repair.cuda_forms import SPELL_OUT_CLIP, SPELL_OUT_MAX_POOL
from halfserve.export.onnx_fp16.repair.edits import RepairPass
from halfserve.export.onnx_fp16.repair.exponentials import (
    FUSE_LOG_SOFTMAX,
    FUSE_SOFTMAX,
    FUSE_SOFTPLUS,
    LIMIT_GELU,
    SPELL_OUT_SILU,
)
from halfserve.export.onnx_fp16.repair.folding import FOLD_BATCH_NORM, FOLD_SCALE, SPELL_OUT_BATCH_NORM
from halfserve.export.onnx_fp16.repair.fragile_chains import KEEP_FRAGILE, KEEP_PARTS
from halfserve.export.onnx_fp16.repair.masks import KEEP_MASKS, SOFTEN_MASKS
from halfserve.export.onnx_fp16.repair.norms import FUSE_LAYER_NORM, FUSE_MOMENTS

# In this order: weights first, then operators in one piece, and last what can only be kept in float32.
REPAIRS: tuple[RepairPass, ...] = (
    FOLD_BATCH_NORM,
    SPELL_OUT_BATCH_NORM,
    FOLD_SCALE,
    FUSE_LAYER_NORM,
    FUSE_MOMENTS,
    FUSE_SOFTMAX,
    FUSE_LOG_SOFTMAX,
    FUSE_SOFTPLUS,
    LIMIT_GELU,
    SOFTEN_MASKS,
    KEEP_MASKS,
    KEEP_FRAGILE,
)


def repairs_for(settings: ConversionSettings) -> tuple[RepairPass, ...]:
    """The passes for a type and a target.

    A type of float32's range needs none that serve the range, and loses digits in norms in parts. MaxPool becomes slices unless
    the model is for CPUs alone. Only a model for CUDA alone has Clip and SiLU spelled out: CPUs fuse Clip with the Conv before
    it, and ONNX Runtime's CPU provider takes twice as long for a SiLU in parts.
    """
    wide, target = settings.half.has_float32_range, settings.target_device
    passes = (*(repair for repair in REPAIRS if not repair.for_range), KEEP_PARTS) if wide else REPAIRS
    return (
        *passes,
        *([SPELL_OUT_MAX_POOL] if target != "cpu" else []),
        *([SPELL_OUT_CLIP] if target == "cuda" and wide else []),
        *([SPELL_OUT_SILU] if target == "cuda" else []),
    )


class PassError(ExportError):
    """A repair failed. That is a fault of this program, not of the model; the text says how to convert without repairs."""


def run_passes(model: onnx_ir.Model, passes: Sequence[RepairPass]) -> tuple[Repair, ...]:
    """Run passes in their order and check after each that it left nothing to repair.

    Returns:
        Everything that the passes changed.

    Raises:
        PassError: A pass or its check failed; the text names the pass, the step and the passes before it.
    """
    repairs: list[Repair] = []
    for index, current in enumerate(passes):
        step = "call"
        try:
            repairs += current.call(model)
            step = "ensures"
            left = next(iter(current.left(model)), None)
        except ExportError:
            raise
        except Exception as error:
            raise _failure(passes, index, step, error) from error
        if left is not None:
            raise _failure(passes, index, step, ValueError(f"{left.name} was not repaired"))
    return tuple(repairs)


def _failure(passes: Sequence[RepairPass], index: int, step: str, error: Exception) -> PassError:
    before = ", ".join(earlier.name for earlier in passes[:index]) or "none"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PassError(
        f"the repair {passes[index].name!r} failed in `{step}` ({text}); passes before it: {before}; "
        "convert without repairs, and report this with the model"
    )
