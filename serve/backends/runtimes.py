"""One runtime for all kinds of model file, which it identifies by their first bytes."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from halfserve.installation import install_hint
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.cpu_trials import CpuTrials
from halfserve.serve.backends.cuda_trials import CudaTrials
from halfserve.serve.backends.onnx_models import OnnxModels
from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.python.runtime import PythonRuntime
from halfserve.serve.engine.backend import COMPILED_FOLDER, NO_TRUST, Backend, DevicePlacement, ModelInterface, Runtime, Trust
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.disk_files import open_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.engine.repository.model_loading import OwnDeclaration
from halfserve.serve.trials.decisions import Decisions, users_folder

if TYPE_CHECKING:
    from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime
    from halfserve.serve.backends.torch_compiled import CompiledRuntime

TRUST_OPTION = "--trust-torch-archives"
TRUST_PYTHON_OPTION = "--trust-python-models"
PYTHON_SUFFIX = ".py"
GRAPH_BYTES = (b"<?xml", b"<net")  # first bytes of files that OpenVINO's ov.save_model writes
ZIP = b"PK\x03\x04"  # first bytes of torch.export.save's files; ONNX files, protobuf messages, cannot begin so


class Runtimes:
    """Passes ONNX files to ONNX Runtime or OpenVINO, torch programs to torch, and OpenVINO graphs to OpenVINO.

    torch and OpenVINO are imported for the first model that needs them.
    """

    def __init__(
        self,
        probe: CrashProbe | None = None,
        trust: Trust = NO_TRUST,
        decisions: Decisions | None = None,
        cuda: CudaTrials | None = None,
    ) -> None:
        """Make the runtimes.

        `probe` loads ONNX models in another process first; None loads them without a trial. `decisions` remembers which
        precision is faster on the CPU, and how models are computed on CUDA devices; None measures at each load. `cuda` replaces
        the trials on CUDA devices.
        """
        decisions = decisions or Decisions()
        self._probe = probe
        self._trust = trust
        self._python = PythonRuntime()
        runtime = OnnxRuntime(probe, trust_custom_operators=trust.custom_operators)
        self._onnx = OnnxModels(runtime, self._openvino_for, CpuTrials(decisions), cuda or CudaTrials(decisions))
        self._torch: Runtime | None = None
        self._compiled: CompiledRuntime | None = None
        self._openvino: OpenVinoRuntime | None = None

    def connect(self, calls: ModelCalls) -> None:
        """See `CoreUser`."""
        self._python.connect(calls)

    def declared(self, path: Path, config: DeclaredConfig, name: str) -> OwnDeclaration | None:
        """See `DeclaringRuntime`; Python models and compiled torch programs have their interface in their configuration.
        Raises ModelLoadError: such models are not trusted here, or this one cannot be used.
        """
        if path.suffix == PYTHON_SUFFIX:
            return self._trusted_python(path).declared(path, config, name)
        return self._compiled.declared(config) if self._of(path) is self._compiled and self._compiled is not None else None

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface. Raises ModelLoadError: the file is missing, is not a model, is an untrusted torch
        program, needs a package that is not installed, or has inputs without a wire type.
        """
        return self._of(path).describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy; see the runtimes.
        Raises ModelLoadError: a setting is invalid, the runtime refuses the model, or a required GPU is missing.
        """
        return self._of(path).load(path, interface, placement, config)

    def _trusted_python(self, path: Path) -> PythonRuntime:
        if not self._trust.python_models:
            raise ModelLoadError(
                f"{path}: is a Python model, which runs any code as the server's user; start the server with "
                f"{TRUST_PYTHON_OPTION} if you trust everybody who writes model files there"
            )
        return self._python

    def _of(self, path: Path) -> Runtime:
        if path.suffix == PYTHON_SUFFIX:
            return self._trusted_python(path)
        try:
            with open_regular(path) as file:
                head = file.read(len(GRAPH_BYTES[0]))
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
        if head.startswith(GRAPH_BYTES):
            return self._openvino_for(path)
        if not head.startswith(ZIP):
            return self._onnx
        if not self._trust.torch_archives:
            raise ModelLoadError(
                f"{path}: is a torch archive, which can run any code as the server's user when it is loaded; export the model "
                f"to ONNX, or start the server with {TRUST_OPTION} if you trust everybody who writes model files there"
            )
        if self._torch is None or self._compiled is None:
            with _installed(path, "a torch program", f"export the model to ONNX, or {install_hint('train')}"):
                from halfserve.serve.backends.torch_backend import TorchRuntime  # noqa: PLC0415  (takes a second, and may not be there)
                from halfserve.serve.backends.torch_compiled import CompiledRuntime  # noqa: PLC0415  (see above)
            self._torch, self._compiled = TorchRuntime(), CompiledRuntime()
        return self._compiled if _is_compiled(path) else self._torch

    def _openvino_for(self, path: Path) -> OpenVinoRuntime:
        if self._openvino is None:
            with _installed(path, "a model for OpenVINO", install_hint("openvino")):
                from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime  # noqa: PLC0415  (may not be there)
            self._openvino = OpenVinoRuntime(self._probe, trust_custom_operators=self._trust.custom_operators)
        return self._openvino


def _is_compiled(path: Path) -> bool:
    """Return whether a torch archive holds a program that AOTInductor compiled."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(COMPILED_FOLDER in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):  # reported by the runtime that reads it
        return False


@contextmanager
def _installed(path: Path, kind: str, remedy: str) -> Iterator[None]:
    """Report a missing package as a reason not to load the model."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"{path}: is {kind}, and the package {error.name!r} is not installed; {remedy}") from None


def probing_runtimes(trust: Trust = NO_TRUST) -> Runtimes:
    """Make all runtimes, with a crash probe; trials are remembered in the user's cache folder."""
    decisions = Decisions(users_folder())
    return Runtimes(CrashProbe(decisions), trust, decisions)
