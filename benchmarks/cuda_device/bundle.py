"""Prepares what `benchmarks/gpu.sh` needs on a machine with a CUDA device, torch and no network: `make gpu-bundle`.

    python -m benchmarks.cuda_device.bundle build/gpu-bundle

FOLDER/models has the networks without their weights, which the device's machine draws. FOLDER/site.tar.xz has the packages that
are not in torch's environment there, for Python 3.12 on Linux, with ONNX Runtime's CUDA provider cut down to one architecture.
All together must stay below 64 MiB.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import onnx
import typer

from benchmarks.cuda_device.exported_networks import write_networks
from benchmarks.cuda_device.networks import BF16, FP16, FP32, skeleton
from benchmarks.cuda_device.one_architecture import SM_90, keep_one
from halfserve import convert_float_to_float16

ROOT = Path(__file__).parents[2]
MOST_BYTES = 64 << 20
NETWORKS = ["resnet", "minilm"]
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# What torch's environment on the device's machine has, and what only reading packages from an index needs.
THERE = frozenset({"grpcio", "ml-dtypes", "mpmath", "numpy", "onnx", "onnxscript", "pytest", "sympy", "torch", "uvloop"})
# What the measurements and tests need beyond serving.
TOOLS = (
    "expecttest",
    "hdrhistogram",
    "hypothesis",
    "nvidia-ml-py",
    "onnx-ir",
    "pytest-randomly",
    "pytest-timeout",
    "safetensors",
)
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
# Parts of ONNX Runtime that its Python package does not load: the C library, TensorRT, tools for other models.
UNUSED = (
    *("onnxruntime/capi/libonnxruntime.so", "onnxruntime/capi/libonnxruntime_providers_tensorrt.so", "onnxruntime/tools/"),
    *("onnxruntime/transformers/", "onnxruntime/ThirdPartyNotices.txt"),
)


def write_models(folder: Path, *, tiny: bool = False) -> None:
    """Write the networks without weights: float32, float16 and bfloat16; in a size for tests if `tiny`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as whole:
        for network in write_networks(Path(whole), NETWORKS, tiny=tiny):
            half = convert_float_to_float16(network.path(FP32), keep_io_types=False, dtype="bfloat16", upgrade_opset=True)
            onnx.save(half, network.path(BF16))
            for precision in (FP32, FP16, BF16):
                path = network.path(precision)
                onnx.save(skeleton(onnx.load(path)), folder / path.name)


def write_site(archive: Path, wheels: Path, architecture: int) -> None:
    """Download the wheels, and pack their files."""
    wheels.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--dest", str(wheels)]
    options += [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *_pins()], check=True)
    with tempfile.TemporaryDirectory() as name:
        site = Path(name)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                for member in packed.namelist():
                    if not member.startswith(UNUSED):
                        packed.extract(member, site)
        program = bytearray((site / PROVIDER).read_bytes())
        keep_one(program, architecture)
        (site / PROVIDER).write_bytes(program)
        with tarfile.open(archive, "w:xz", preset=6) as packed:
            packed.add(site, "site")


def _pins() -> list[str]:
    """Versions, such as "ngh2==0.3.0", of what serving and TOOLS need, but for the packages on the device's machine."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
    command += ["--python-version", PYTHON, "--constraint", str(ROOT / "constraints.txt"), str(ROOT / "pyproject.toml"), "-"]
    done = subprocess.run(command, input="\n".join(TOOLS), capture_output=True, text=True, check=True)
    return [pin for pin in done.stdout.splitlines() if pin.partition("==")[0] not in THERE]


def main(
    folder: Path,
    architecture: Annotated[int, typer.Option(help="Number of the device's architecture: 90 for H100 and H200.")] = SM_90,
    *,
    models_only: Annotated[
        bool, typer.Option("--models-only", help="Leave the packages out: this environment has them.")
    ] = False,
) -> None:
    """Write the bundle, and check its size."""
    write_models(folder / "models")
    if not models_only:
        write_site(folder / "site.tar.xz", folder.with_name("gpu-wheels"), architecture)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / (1 << 20):.1f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"{folder} has more than {MOST_BYTES >> 20} MiB, and would not travel")


if __name__ == "__main__":
    typer.run(main)
