"""Examines one part of this machine in a process of its own, as a broken library may crash or hang it.

python -m halfserve.serve.doctor.examination PART

PART is a name in PARTS. The process prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.nvidia_libraries import NvidiaLibrary, cuda_major, nvidia_libraries

Facts = dict[str, Any]
LONGEST_S = 120.0  # first use of a CUDA device after a start of the machine may take tens of seconds
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
MAPPED_FILES = Path("/proc/self/maps")
# Arithmetic of the processor that matters for half precision, by the system's name of it.
ARITHMETIC = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "amx_int8": "AMX-INT8",
    "asimdhp": "FP16",
    "bf16": "BF16",
    "sve": "SVE",
}


def examine(part: str) -> Facts:
    """Examine a part in a process of its own; a crash, an exception or a hang is the text "error" of the result."""
    command = [sys.executable, "-m", __name__, part]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LONGEST_S:g} s"}
    with suppress(ValueError, IndexError):
        facts: Facts = json.loads(done.stdout.splitlines()[-1])
        return facts
    lines = done.stderr.strip().splitlines()
    reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return {"error": f"the process ended with {reason}{f': {lines[-1]}' if lines else ''}"}


def processor() -> Facts:
    """Name, cores, and arithmetic of the processor."""
    from halfserve.serve.backends.openvino.fitness import computed_halves, fast_halves, processor_flags, processor_name  # noqa: PLC0415  (only this part needs it, and it may be broken)
    from halfserve.serve.engine.resource_limits import usable_cores  # noqa: PLC0415  (only this part needs it, and it may be broken)

    flags = processor_flags()
    return {
        "name": processor_name() or "unknown",
        "cores": usable_cores(),
        "arithmetic": [name for flag, name in ARITHMETIC.items() if flag in flags],
        "halves": sorted(computed_halves()),
        "fast_halves": sorted(fast_halves()),
    }


def onnx_runtime() -> Facts:
    """Version and providers of ONNX Runtime, and whether it computes on the CPU."""
    import onnxruntime as ort  # noqa: PLC0415  (only this part needs it, and it may be broken)
    from onnx import TensorProto, helper  # noqa: PLC0415  (only this part needs it, and it may be broken)

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "doubled", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    answer = np.asarray(session.run(None, {"x": np.ones(1, "float32")})[0])
    if answer.tolist() != [2.0]:
        raise ValueError(f"ONNX Runtime computed 1 + 1 = {answer.tolist()[0]}; install it again")
    return {"version": ort.__version__, "cuda": ort.cuda_version, "providers": ort.get_available_providers()}


def openvino() -> Facts:
    """Version and devices of OpenVINO."""
    import_module("halfserve.serve.backends.openvino")  # first, so that OpenVINO reports nothing
    import openvino as ov  # noqa: PLC0415  (only this part needs it, and it may be broken)

    return {"version": metadata.version("openvino"), "devices": ov.Core().available_devices}


def devices() -> Facts:
    """CUDA's driver and its devices, and the reason where there are none."""
    from halfserve.serve.engine.cuda_driver import DRIVER_NAMES, CudaDriver, CudaError  # noqa: PLC0415  (only this part needs it, and it may be broken)

    facts: Facts = {"on_bus": _devices_on_bus(), "kernel_module": _kernel_module()}
    reasons = []
    for name in DRIVER_NAMES:
        try:
            driver = CudaDriver(ctypes.CDLL(name))
            found = [driver.describe(number) for number in range(driver.device_count)]
        except (OSError, AttributeError, CudaError) as error:
            reasons.append(str(error))
        else:
            return facts | {"cuda": driver.version, "devices": found}
    return facts | {"devices": [], "reason": reasons[0]}


def libraries() -> Facts:
    """NVIDIA's libraries for the installed ONNX Runtime: version, path, and why one cannot be loaded."""
    import onnxruntime as ort  # noqa: PLC0415  (only this part needs it, and it may be broken)

    major = cuda_major(ort.cuda_version)
    return {"libraries": [_library(library) for library in nvidia_libraries(major)] if major else []}


def cuda() -> Facts:
    """Why a model is not computed on the first CUDA device, by its operator and as a server opens it; "" if it is computed."""
    from onnx import TensorProto, helper, numpy_helper, save  # noqa: PLC0415  (only this part needs it, and it may be broken)

    from halfserve.serve.backends.onnx_runtime.probe_child import ones  # noqa: PLC0415  (only this part needs it, and it may be broken)
    from halfserve.serve.backends.onnx_runtime.session import SessionOpener  # noqa: PLC0415  (only this part needs it, and it may be broken)
    from halfserve.serve.engine.backend import DevicePlacement  # noqa: PLC0415  (only this part needs it, and it may be broken)
    from halfserve.serve.engine.cuda_driver import device_count  # noqa: PLC0415  (only this part needs it, and it may be broken)

    if not device_count():
        return {}
    logging.disable()
    tried: dict[str, str] = {}
    for operator, shape in {"MatMul": [8, 8], "Conv": [8, 8, 3, 3]}.items():
        half = TensorProto.FLOAT16
        x, y = (helper.make_tensor_value_info(name, half, ["rows", *shape[1:]]) for name in "xy")
        weight = numpy_helper.from_array(np.ones(shape, "float16"), "w")
        graph = helper.make_graph([helper.make_node(operator, ["x", "w"], ["y"])], operator, [x], [y], [weight])
        del graph.output[0].type.tensor_type.shape.dim[:]
        with tempfile.TemporaryDirectory(prefix="halfserve-doctor-") as folder:
            path = Path(folder) / "model.onnx"
            save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
            try:
                session = SessionOpener(path=path, placement=DevicePlacement(require_gpu=True)).open().session
                session.run(None, {"x": ones(session.get_inputs()[0])})
                tried[operator] = ""
            except Exception as error:  # noqa: BLE001  (ONNX Runtime has no exception class)
                tried[operator] = str(error).removeprefix(f"{path}: ")
    return {"tried": tried}


PARTS: dict[str, Callable[[], Facts]] = {
    part.__name__: part for part in (processor, onnx_runtime, openvino, devices, libraries, cuda)
}


def _kernel_module() -> str:
    """Return the version of NVIDIA's kernel module, which is the driver's; "" if none is loaded."""
    with suppress(OSError):
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", KERNEL_MODULE.read_text())
        return found[1] if found else ""
    return ""


def _devices_on_bus() -> int:
    """Return how many NVIDIA devices the PCI bus has, with or without a driver."""
    found = 0
    with suppress(OSError):
        for device in PCI_DEVICES.iterdir():
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            found += vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASS)
    return found


def _library(library: NvidiaLibrary) -> Facts:
    problem = library.why_missing()
    path = None if problem else library.path() or _mapped(library.file)
    return {
        "title": library.title,
        "file": library.file,
        "package": library.package,
        "is_required": library.is_required,
        "version": _version(library, path),
        "path": None if path is None else str(path),
        "problem": problem,
    }


def _mapped(file: str) -> Path | None:
    """Return the path of a loaded library, whose file's name may have more numbers."""
    with suppress(OSError):
        paths = (Path(line.split()[-1]) for line in MAPPED_FILES.read_text().splitlines() if "/" in line)
        return next((path for path in paths if path.name.startswith(file)), None)
    return None


def _version(library: NvidiaLibrary, path: Path | None) -> str:
    """Return the package's version if the library lies in it, or else the numbers at the end of the file's name."""
    if path is None:
        return ""
    with suppress(metadata.PackageNotFoundError):
        found = metadata.distribution(library.package)
        if any(found.locate_file(file) == path for file in found.files or ()):
            return found.version
    return path.resolve().name.partition(".so.")[2]


def main(part: str) -> None:
    """Print the facts of a part."""
    try:
        facts = PARTS[part]()
    except Exception as error:  # noqa: BLE001  (the report names what cannot be examined)
        facts = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"{json.dumps(facts)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
