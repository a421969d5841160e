"""Every kind of model file behind one runtime: the file's own first bytes say what it is."""

from __future__ import annotations

from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.backends.onnx_runtime.probe.crash_probe import CrashProbe
from serve.backends.onnx_runtime.probe.crash_verdicts import CrashVerdicts, default_folder
from serve.engine.backend import Backend, DevicePlacement, ModelInterface, Runtime
from serve.engine.disk_files import open_regular
from serve.engine.errors import ModelLoadError

TRUST_OPTION = "--trust-torch-archives"
ZIP = b"PK\x03\x04"  # what torch.export.save writes; an ONNX file is a protobuf message, which cannot begin so


class Runtimes:
    """ONNX files go to ONNX Runtime, exported torch programs to torch, which is imported for the first of them."""

    def __init__(self, probe: CrashProbe | None = None, *, trust_torch_archives: bool = False) -> None:
        """All runtimes.

        Args:
            probe: tries ONNX models out before they are loaded here; None trusts them.
            trust_torch_archives: load torch programs too, which can run any code as this process's user.
        """
        self._onnx = OnnxRuntime(probe)
        self._trust_torch_archives = trust_torch_archives
        self._torch: Runtime | None = None

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface.

        Raises:
            ModelLoadError: the file is missing, is no model, is a torch program and these are not trusted, needs a package that
                is not installed, or has inputs that cannot travel on the wire.
        """
        return self._of(path).describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy; see the runtimes.

        Raises:
            ModelLoadError: a setting cannot be read, the runtime refuses the model, or there is no GPU and one is required.
        """
        return self._of(path).load(path, interface, placement, config)

    def _of(self, path: Path) -> Runtime:
        try:
            with open_regular(path) as file:
                is_torch = file.read(len(ZIP)) == ZIP
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
        if not is_torch:
            return self._onnx
        if not self._trust_torch_archives:
            raise ModelLoadError(
                f"{path}: is a torch archive, which can run any code as the server's user when it is loaded; export the model "
                f"to ONNX, or start the server with {TRUST_OPTION} if you trust everybody who writes model files there"
            )
        if self._torch is None:
            try:
                from serve.backends.torch_backend import TorchRuntime  # noqa: PLC0415  (takes a second, and may not be there)
            except ModuleNotFoundError as error:
                raise ModelLoadError(
                    f"{path}: is a torch program, and the package {error.name!r} is not installed; pip install "
                    "'halfserve[train]', or export the model to ONNX"
                ) from None
            self._torch = TorchRuntime()
        return self._torch


def probing_runtimes(*, trust_torch_archives: bool = False) -> Runtimes:
    """All runtimes, with a probe that keeps its verdicts in the user's cache folder; see `Runtimes`."""
    return Runtimes(CrashProbe(CrashVerdicts(default_folder())), trust_torch_archives=trust_torch_archives)
