"""Errors after which a copy of a model cannot compute any more, whatever it is given."""

from __future__ import annotations

from serve.engine.errors import BackendError, InferenceError, ModelLoadError

# CUDA reports these once, and from then on for every call of the process's context:
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
SIGNS = (
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "invalid program counter",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "uncorrectable ecc error",
    "hardware stack error",
    "global/shared address space",
    "uncorrectable nvlink error",
    "the launch timed out",
    "cuda failure 700",
    "cuda failure 719",
    "cuda error 700",
    "cuda error 719",
)


class InstanceLostError(Exception):
    """A copy of a model has to be loaded anew; the requests that it was computing have no answer."""


def is_device_lost(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that the device will not compute for this copy again."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_a_runtimes(cause) and any(sign in str(cause).lower() for sign in SIGNS):
            return True
        cause = cause.__cause__
    return False


def _is_a_runtimes(error: BaseException) -> bool:
    """Whether a runtime chose the words. Ours name regions and files, which are called what a client wants."""
    return isinstance(error, BackendError) or not isinstance(error, InferenceError | ModelLoadError)
