"""The driver's library that a test uses: the real one, or the emulated one, which is compiled first."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from serve.engine.cuda_driver import DRIVER_NAMES, CudaDriver, device_count

SOURCE = Path(__file__).with_name("driver.c")
LIBRARIES = ["emulated", pytest.param("real", marks=pytest.mark.gpu)]


def library_path(name: str, folder: Path) -> str:
    """Where a library is, by its name in LIBRARIES. Skips the test where it cannot be had.

    Args:
        name: of the library.
        folder: for what is compiled.
    """
    if name == "real":
        if not device_count():
            pytest.skip("needs a CUDA device")
        return DRIVER_NAMES[0]
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the emulated driver")
    path = folder / "libcuda_emulated.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-lrt"], check=True)
    return str(path)


def driver_of(path: str) -> CudaDriver:
    """The driver behind a library."""
    return CudaDriver(ctypes.CDLL(path))
