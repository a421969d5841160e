"""NVIDIA's libraries under ONNX Runtime's CUDA provider: where they lie, their versions, and loading them.

pip puts them into `nvidia/cu13/lib` (CUDA 13), `nvidia/cublas/lib` and its like (CUDA 12) and `nvidia/cudnn/lib`, in any folder
of `sys.path`. ONNX Runtime's own `preload_dlls` looks beside its own folder alone, which is another one where torch's
environment holds the libraries. The dynamic loader takes a library that is already loaded for one of the same name.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from halfserve.files.cuda_products import CUDA_ENVIRONMENT

CUDNN = "cuDNN"
_preloading = threading.Lock()  # redirect_stdout is not thread-safe


@dataclass(frozen=True, kw_only=True)
class NvidiaLibrary:
    """A library, and the package that brings it."""

    title: str  # NVIDIA's name
    file: str  # name by which the dynamic loader finds it
    package: str  # name of the package in Python's index
    is_required: bool = True  # whether the provider cannot be loaded without it

    def path(self) -> Path | None:
        """Return the file that is loaded: from LD_LIBRARY_PATH, or else from a package; None leaves it to the system."""
        return next((folder / self.file for folder in _folders() if (folder / self.file).is_file()), None)

    def why_missing(self) -> str | None:
        """Load the library; return the loader's reason where that fails."""
        path = self.path()
        try:
            ctypes.CDLL(self.file if path is None else str(path))
        except OSError as error:
            return f"{error}; the package {self.package} brings it"
        return None


def cuda_major(version: str) -> int:
    """Return the major number of a CUDA version such as "13.0"; 0 for the "" of a runtime without CUDA."""
    return int(version.partition(".")[0] or 0)


def nvidia_libraries(major: int) -> tuple[NvidiaLibrary, ...]:
    """Return the libraries for CUDA 12 or 13, in an order in which each needs earlier ones alone.

    Since CUDA 13 most packages have no suffix such as -cu12.
    """
    suffix, fft = ("", 12) if major >= 13 else (f"-cu{major}", 11)
    return (
        NvidiaLibrary(title="CUDA runtime", file=f"libcudart.so.{major}", package=f"nvidia-cuda-runtime{suffix}"),
        NvidiaLibrary(title="cuBLASLt", file=f"libcublasLt.so.{major}", package=f"nvidia-cublas{suffix}"),
        NvidiaLibrary(title="cuBLAS", file=f"libcublas.so.{major}", package=f"nvidia-cublas{suffix}"),
        NvidiaLibrary(title="cuRAND", file="libcurand.so.10", package=f"nvidia-curand{suffix}"),
        NvidiaLibrary(title="NVRTC", file=f"libnvrtc.so.{major}", package=f"nvidia-cuda-nvrtc{suffix}", is_required=False),
        NvidiaLibrary(title="cuFFT", file=f"libcufft.so.{fft}", package=f"nvidia-cufft{suffix}", is_required=False),
        NvidiaLibrary(title=CUDNN, file="libcudnn.so.9", package=f"nvidia-cudnn-cu{major}", is_required=False),
    )


@cache
def load_nvidia_libraries() -> str:
    """Load what the installed ONNX Runtime needs on CUDA, once; return why a required library cannot be loaded, or "".

    Sets the environment variables that the provider reads when it loads.
    """
    import onnxruntime as ort  # noqa: PLC0415  (it may not be installed where libraries are only listed)

    for name, value in CUDA_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.platform != "linux":
        with _preloading, contextlib.redirect_stdout(io.StringIO()) as printed:
            ort.preload_dlls()
        return printed.getvalue().strip().split("\n")[0]
    missing = [(library, library.why_missing()) for library in nvidia_libraries(cuda_major(ort.cuda_version))]
    return next((reason for library, reason in missing if reason and library.is_required), "")


@cache
def why_no_cudnn() -> str | None:
    """Return why cuDNN cannot be loaded; None if it is loaded, or this is not Linux."""
    import onnxruntime as ort  # noqa: PLC0415  (see above)

    if sys.platform != "linux":
        return None
    (cudnn,) = (library for library in nvidia_libraries(cuda_major(ort.cuda_version)) if library.title == CUDNN)
    return cudnn.why_missing()


def _folders() -> Iterator[Path]:
    """Yield the folders that may hold libraries: what the user has set comes before what is installed."""
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    for entry in sys.path:
        yield from sorted(Path(entry or ".", "nvidia").glob("*/lib"))
