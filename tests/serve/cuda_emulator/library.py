"""The libraries that a test uses: the real driver, or the emulated one, which is compiled first; and the emulated runtime."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import onnxruntime as ort
import pytest

from halfserve.serve.engine.cuda_driver import DRIVER_NAMES, CudaDriver, device_count

# driver.c and runtime.c stand on device.c; each of the other libraries has a file of its own.
SOURCES = [Path(__file__).with_name(name) for name in ("device.c", "driver.c", "runtime.c")]
CUBLAS_SOURCE = Path(__file__).with_name("cublas.c")
CUDNN_SOURCE = Path(__file__).with_name("cudnn.c")
NUMBER_OF_DEVICES = "EMULATED_CUDA_DEVICES"  # of the environment; 1 where it is not set
PROVIDER = Path(ort.__file__).with_name("capi") / "libonnxruntime_providers_cuda.so"
TENSORRT_PROVIDER = PROVIDER.with_name("libonnxruntime_providers_tensorrt.so")
# What a program misses: "                 U cudaMalloc@libcudart.so.13".
MISSED = re.compile(r" U (\w+)(?:@(lib(?:cu\w+)\.so\.\d+))?$", re.MULTILINE)
# cuDNN is opened by name when the first session is made, so that its functions are only texts in the provider.
CUDNN, OF_CUDNN = "libcudnn.so.9", re.compile(rb"(?<=\0)cudnn[A-Z]\w+(?=\0)")
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
    path = folder / "libcuda_emulated.so"
    _compile(path, *SOURCES)
    return str(path)


def make_device(folder: Path) -> None:
    """Fill a folder with the libraries that ONNX Runtime's CUDA provider and the driver's users look for.

    A process that has the folder in its LD_LIBRARY_PATH has a CUDA device then, or as many as NUMBER_OF_DEVICES in its
    environment says. Skips the test where the provider is not there.
    """
    if not PROVIDER.is_file():
        pytest.skip("this ONNX Runtime has no CUDA provider for Linux")
    missed = _missed(PROVIDER)
    libraries = re.findall(r"\[(libcu\w+\.so\.\d+)\]", _output("readelf", "-d", PROVIDER))
    runtime = next(name for name in libraries if name.startswith("libcudart."))
    driver = DRIVER_NAMES[0]
    _make(folder, runtime, missed[runtime] | missed[""], SOURCES)
    needs = ("-Wl,--no-as-needed", folder / runtime, "-Wl,-rpath,$ORIGIN")
    for name in libraries:
        if name not in {runtime, driver}:
            _make(folder, name, missed[name], [CUBLAS_SOURCE] if name.startswith("libcublas") else [], *needs)
    _make(folder, driver, set(), [], *needs)
    _make(folder, CUDNN, {name.decode() for name in OF_CUDNN.findall(PROVIDER.read_bytes())}, [CUDNN_SOURCE], *needs)


def _make(folder: Path, name: str, wanted: set[str], sources: list[Path], *needs: str | Path) -> None:
    """Compile a library of these sources, and of generated functions for what they lack of the wanted ones."""
    own = {found for source in sources for found in re.findall(r"^\w[\w *]*?\b(\w+)\(", source.read_text(), re.MULTILINE)}
    rest, version = folder / f"{name}.c", folder / f"{name}.map"
    rest.write_text("".join(map(_generated, sorted(wanted - own))) or "int nothing;\n")
    version.write_text(f"{name} {{ global: *; }};\n")
    _compile(folder / name, rest, *sources, f"-Wl,-soname,{name}", f"-Wl,--version-script={version}", *needs)


def make_tensorrt(folder: Path) -> None:
    """Add TensorRT's libraries, which do nothing: listing all kernels loads every provider, and crashes without one."""
    wanted = re.compile(r"create\w+_INTERNAL|getInferLibVersion|getPluginRegistry")
    missed = re.findall(r" U (\w+)$", _output("nm", "-D", "--undefined-only", TENSORRT_PROVIDER), re.MULTILINE)
    made = {name for name in missed if wanted.fullmatch(name)}
    source = folder / "tensorrt.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in sorted(made)))
    for name in re.findall(r"\[(libnv\w+\.so\.\d+)\]", _output("readelf", "-d", TENSORRT_PROVIDER)):
        _compile(folder / name, source, f"-Wl,-soname,{name}")


def _generated(name: str) -> str:
    """A function that does nothing; what it would create is somewhere. Those of cuBLAS that compute can fail."""
    if name.startswith("cublas") and not re.search("Create|Destroy|Get|Set|Init", name):
        return f"int emulated_compute(void *); int {name}(void *handle) {{ return emulated_compute(handle); }}\n"
    return f"int {name}(void **made) {{ {'*made = made;' if 'Create' in name else '(void)made;'} return 0; }}\n"


def _missed(program: Path) -> dict[str, set[str]]:
    """The functions of CUDA that a program misses, by library; by "" where it does not say which."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, library in MISSED.findall(_output("nm", "-D", "--undefined-only", program)):
        if library or name.startswith("cu"):
            found[library].add(name)
    return found


def _output(*command: str | Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]} to see what the CUDA provider calls")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _compile(path: Path, *what: str | Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the emulated driver")
    flags = ("-shared", "-fPIC", "-O1", "-Wno-builtin-declaration-mismatch")
    subprocess.run([compiler, *flags, "-o", path, *what, "-lrt", "-lpthread"], check=True)


def driver_of(path: str) -> CudaDriver:
    """The driver behind a library."""
    return CudaDriver(ctypes.CDLL(path))
