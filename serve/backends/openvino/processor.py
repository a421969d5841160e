"""The half-precision types that this processor computes, by the flags that the system reports. Does not need OpenVINO.

x86 has bf16 since AVX512-BF16 (Zen 4, Cooper Lake) and AMX (Sapphire Rapids), fp16 since AVX512-FP16 (Sapphire Rapids); the
latter is only as fast as float32, AMX-FP16 (Granite Rapids) is faster. Arm has both from Neoverse V1 on.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})
FAST_FP16_FLAGS = frozenset({"amx_fp16", "asimdhp"})
# Values of ONEDNN_MAX_CPU_ISA, which OpenVINO obeys, that leave out the arithmetic of a type.
ISAS_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
ISAS_WITHOUT_FP16 = ISAS_WITHOUT_BF16 | {"AVX512_CORE_BF16"}


def computed_halves() -> frozenset[str]:
    """Return the types among "bf16" and "fp16" in which this processor has arithmetic."""
    return _halves(FP16_FLAGS)


def fast_halves() -> frozenset[str]:
    """Return the types among "bf16" and "fp16" that this processor computes faster than float32."""
    return _halves(FAST_FP16_FLAGS)


@cache
def processor_name() -> str:
    """Return the processor's model, as the system names it; "" if it does not."""
    with contextlib.suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))), "")
    return ""


def _halves(fp16: frozenset[str]) -> frozenset[str]:
    flags, isa = _flags(), os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    halves = (("bf16", BF16_FLAGS, ISAS_WITHOUT_BF16), ("fp16", fp16, ISAS_WITHOUT_FP16))
    return frozenset(name for name, known, without in halves if flags & known and isa not in without)


@cache
def _flags() -> frozenset[str]:
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())
