"""Repairs: rewrites of a float32 graph, equal in exact arithmetic, that half precision can hold."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import HALF_TYPES, HalfName, TargetDevice
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

_BOTH: frozenset[HalfName] = frozenset(HALF_TYPES)
_FLOAT16: frozenset[HalfName] = frozenset({"float16"})
_BFLOAT16: frozenset[HalfName] = frozenset({"bfloat16"})
_ALL: frozenset[TargetDevice] = frozenset({"any", "cpu", "cuda"})
_WITH_CUDA: frozenset[TargetDevice] = frozenset({"any", "cuda"})
_CUDA_ALONE: frozenset[TargetDevice] = frozenset({"cuda"})

# Each pass with the types and the targets that it is for, in this order: weights first, then operators in one piece, then what
# can only be kept in float32, and last the forms for kernels. bfloat16 has float32's range: it needs no pass that serves the
# range, and loses digits in norms in parts.
REPAIRS: tuple[tuple[RepairPass, frozenset[HalfName], frozenset[TargetDevice]], ...] = (
    (FOLD_BATCH_NORM, _BOTH, _ALL),
    (SPELL_OUT_BATCH_NORM, _FLOAT16, _ALL),
    (FOLD_SCALE, _FLOAT16, _ALL),
    (FUSE_LAYER_NORM, _BOTH, _ALL),
    (FUSE_MOMENTS, _BOTH, _ALL),
    (FUSE_SOFTMAX, _BOTH, _ALL),
    (FUSE_LOG_SOFTMAX, _BOTH, _ALL),
    (FUSE_SOFTPLUS, _BOTH, _ALL),
    (LIMIT_GELU, _FLOAT16, _ALL),
    (SOFTEN_MASKS, _FLOAT16, _ALL),
    (KEEP_MASKS, _FLOAT16, _ALL),
    (KEEP_FRAGILE, _FLOAT16, _ALL),
    (KEEP_PARTS, _BFLOAT16, _ALL),
    (SPELL_OUT_MAX_POOL, _BOTH, _WITH_CUDA),
    (SPELL_OUT_CLIP, _BFLOAT16, _CUDA_ALONE),  # CPUs fuse Clip with the Conv before it
    (SPELL_OUT_SILU, _BOTH, _CUDA_ALONE),  # ONNX Runtime's CPU provider takes twice as long for a SiLU in parts
)


def repairs_for(settings: ConversionSettings) -> tuple[RepairPass, ...]:
    """Return the passes for a type and a target."""
    dtype, target = settings.half.name, settings.target_device
    return tuple(each for each, dtypes, targets in REPAIRS if dtype in dtypes and target in targets)


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
