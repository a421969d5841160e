"""One runtime for every kind of model file, chosen by the file's first bytes."""

from __future__ import annotations

from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe, CrashVerdictCache, default_folder
from halfserve.serve.engine.backend import Backend, DevicePlacement, ModelInterface, Runtime
from halfserve.serve.engine.disk_files import open_regular
from halfserve.serve.engine.errors import ModelLoadError

TRUST_OPTION = "--trust-torch-archives"
ZIP = b"PK\x03\x04"  # what torch.export.save writes; an ONNX file is a protobuf message, which cannot begin so


class Runtimes:
    """ONNX files go to ONNX Runtime, exported torch programs to torch, which is imported for the first of them."""

    def __init__(
        self, probe: CrashProbe | None = None, *, trust_torch_archives: bool = False, trust_custom_operators: bool = False
    ) -> None:
        """`probe` loads ONNX models in another process first; None trusts them.

        Torch programs can run any code as this process's user; `trust_torch_archives` loads them. For `trust_custom_operators`
        see `OnnxRuntime`.
        """
        self._onnx = OnnxRuntime(probe, trust_custom_operators=trust_custom_operators)
        self._trust_torch_archives = trust_torch_archives
        self._torch: Runtime | None = None

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface.

        Raises:
            ModelLoadError: the file is missing, is not a model, is an untrusted torch program, needs a package that is not
            installed,
                or has inputs without a wire type.
        """
        return self._of(path).describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy; see the runtimes.

        Raises:
            ModelLoadError: a setting is invalid, the runtime refuses the model, or a required GPU is missing.
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
                from halfserve.serve.backends.torch_backend import TorchRuntime  # noqa: PLC0415  (takes a second, and may not be there)
            except ModuleNotFoundError as error:
                raise ModelLoadError(
                    f"{path}: is a torch program, and the package {error.name!r} is not installed; in a checkout of "
                    "halfserve, pip install '.[train]', or export the model to ONNX"
                ) from None
            self._torch = TorchRuntime()
        return self._torch


def probing_runtimes(*, trust_torch_archives: bool = False, trust_custom_operators: bool = False) -> Runtimes:
    """All runtimes, with a crash probe that caches its verdicts in the user's cache folder."""
    probe = CrashProbe(CrashVerdictCache(default_folder()))
    return Runtimes(probe, trust_torch_archives=trust_torch_archives, trust_custom_operators=trust_custom_operators)
