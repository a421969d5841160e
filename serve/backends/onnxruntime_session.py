"""Open an ONNX file in ONNX Runtime: fp16 on CUDA, upcast to fp32 on the CPU, and never one for the other unsaid."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from serve.backends.cuda import device_count
from serve.backends.onnx_interface import load_onnx, read_external_weights
from serve.backends.upcast import computes_in_fp16, upcast_to_fp32
from serve.engine.backend import Placement
from serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# A new input shape costs milliseconds instead of an exhaustive search's hundreds.
CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC"}
# protobuf serializes at most 2 GiB; a larger model goes to the runtime through a file.
MAX_SERIALIZED_BYTES = 2**31 - 1
LOG_NOTHING_BUT_FATAL = 4  # what fails is raised, or said below in one line


@dataclass(frozen=True)
class OpenSession:
    """A session, and what it computes in.

    Attributes:
        session: the runtime's own.
        precision: in words: "fp16", "fp32", or "fp32 (the fp16 model, upcast)".
    """

    session: ort.InferenceSession
    precision: str

    @property
    def provider(self) -> str:
        """Where it computes, as the runtime reports it."""
        return str(self.session.get_providers()[0])


def open_session(path: Path, placement: Placement) -> OpenSession:
    """Open on the CUDA device where there is one and it may be used, and on the CPU otherwise.

    A device that the runtime cannot use (its libraries are missing, say) is named in a warning.

    Raises:
        ModelLoadError: the runtime refuses the model, or a GPU is required and cannot be used.
    """
    ort.set_default_logger_severity(LOG_NOTHING_BUT_FATAL)
    if not placement.use_gpu:
        return _on_cpu(path, placement)
    reason = _why_no_device(placement)
    if reason is None:
        missing = _preload_cuda()
        opened = _on_gpu(path, placement)
        if opened.provider == CUDA:
            return opened
        reason = f"ONNX Runtime cannot use CUDA device {placement.device_id} ({missing or 'it does not say why'})"
    elif not placement.require_gpu:
        return _on_cpu(path, placement)
    if placement.require_gpu:
        raise ModelLoadError(f"{path}: a GPU is required, but {reason}; pip install 'halfserve[cuda]' or allow the CPU")
    logger.warning("%s: %s; it runs on the CPU. To use the GPU: pip install 'halfserve[cuda]'", path, reason)
    return _on_cpu(path, placement)


def _why_no_device(placement: Placement) -> str | None:
    if CUDA not in ort.get_available_providers():
        return "this ONNX Runtime is built without CUDA"
    devices = device_count()
    if placement.device_id >= devices:
        return f"CUDA device {placement.device_id} is not there ({devices} found; is the NVIDIA driver installed?)"
    return None


def _preload_cuda() -> str:
    """Find CUDA and cuDNN where pip installed them; what the runtime prints about it is its first complaint, or nothing."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls()
    return printed.getvalue().strip().split("\n")[0]


def _on_gpu(path: Path, placement: Placement) -> OpenSession:
    providers = [(CUDA, {**CUDA_OPTIONS, "device_id": str(placement.device_id)}), CPU]
    precision = "fp16" if computes_in_fp16(load_onnx(path)) else "fp32"
    return OpenSession(_session(path, str(path), placement, providers), precision)


def _on_cpu(path: Path, placement: Placement) -> OpenSession:
    model = load_onnx(path)
    if not computes_in_fp16(model):
        return OpenSession(_session(path, str(path), placement, [CPU]), "fp32")
    read_external_weights(model, path)
    upcast_to_fp32(model)
    precision = "fp32 (the fp16 model, upcast)"
    if model.ByteSize() <= MAX_SERIALIZED_BYTES:
        return OpenSession(_session(path, model.SerializeToString(), placement, [CPU]), precision)
    with tempfile.TemporaryDirectory(prefix="halfserve-") as folder:
        copy = Path(folder) / "model.onnx"
        onnx.save(model, copy, save_as_external_data=True, location="weights.bin")
        return OpenSession(_session(path, str(copy), placement, [CPU]), precision)


def _session(path: Path, model: str | bytes, placement: Placement, providers: list[Any]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = LOG_NOTHING_BUT_FATAL
    options.intra_op_num_threads = placement.threads
    # Threads that spin while they wait take the core from the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(model, options, providers=providers)
    except Exception as error:
        # The runtime's exceptions have no common class of their own.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"{path}: ONNX Runtime refuses the model: {reason}") from error
