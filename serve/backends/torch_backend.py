"""Exported torch programs behind the engine's backend interface. Only files named torch_* import torch."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError  # raised by torch
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.export.passes import move_to_device_pass

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.cuda import RECORDING_LOCK, settle_thread
from halfserve.serve.backends.onnx_runtime.request_errors import IndexRange, check_indices
from halfserve.serve.backends.onnx_runtime.session_settings import read_settings
from halfserve.serve.backends.torch_device_runs import CudaStream, DeviceRuns
from halfserve.serve.backends.torch_program import (
    SizeRange,
    can_upcast,
    check_sizes,
    half_dtypes,
    index_ranges,
    program_interface,
    size_ranges,
    upcast_graph,
    upcast_tensor,
    written,
)
from halfserve.serve.engine.backend import ALLOW_CPU, DevicePlacement, ModelInterface
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.resource_limits import fewer_cores
from halfserve.serve.engine.tensors import Array, Tensors

CPU = torch.device("cpu")
BUCKETS = "halfserve.padding_buckets"
USER_INPUT = InputKind.USER_INPUT
# torch.export.load logs a traceback for an unreadable file before it raises.
UNREADABLE_WARNINGS = ("Ran into the following error when deserializing", "Unable to load package")
# torch's environment switches for `torch.load`.
FORCE_WEIGHTS_ONLY, FORCE_ANYTHING = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_environment = threading.Lock()  # else, of two threads that change the environment, each would restore the other's change

_File: TypeAlias = tuple[Path, int, int, int]  # path, inode, modification time (ns) and size, to detect replacement


class TorchRuntime:
    """Loads files of torch.export.save, which are programs that name the functions they call: see `Runtimes`."""

    def __init__(self) -> None:
        self._described: tuple[_File | None, ExportedProgram] | None = None

    def describe(self, path: Path) -> ModelInterface:
        """Read a program's interface, and keep the program for the `load` that follows.
        Raises ModelLoadError: the file is not an exported program, or has inputs or outputs without a wire type.
        """
        file, program = _file(path), _read(path)
        self._described = (file, program)
        return program_interface(program, path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> TorchBackend:
        """Load one copy, on the CUDA device if there is one and it may be used, otherwise on the CPU.

        On the CPU a half-precision program computes in fp32, if that preserves its meaning.

        Raises:
            ModelLoadError: a setting is invalid, or a required GPU cannot be used.
        """
        device = chosen_device(path, placement)
        described, self._described = self._described, None
        program = described[1] if described is not None and described[0] == _file(path) else _read(path)
        halves = half_dtypes(program)
        indices = index_ranges(program)
        upcast = bool(halves) and device == CPU and can_upcast(program)
        asked = read_settings(config, path).intra_op_threads
        if device == CPU:
            set_threads(asked, placement)
        else:
            settle_thread(placement.device_id)
            with RECORDING_LOCK.opening():
                program = move_to_device_pass(program, str(device))
        if upcast:
            upcast_graph(program.graph_module)
        specs, changes = program.graph_signature.input_specs, written(program.graph_module)
        backend = TorchBackend(
            provider=f"torch on {device}",
            precision=f"fp32 (the {halves} model, upcast)" if upcast else halves or "fp32",
            _program=program.graph_module,
            _arguments=[_argument(program, spec, upcast=upcast) for spec in specs],
            _changing=[i for i, s in enumerate(specs) if s.arg.name in changes and s.kind is not USER_INPUT],
            _places={s.arg.name: i for i, s in enumerate(specs) if isinstance(s.arg, TensorArgument) and s.kind is USER_INPUT},
            _dtypes={spec.name: spec.datatype.array_dtype for spec in interface.inputs},
            _skipped=len(program.graph_signature.output_specs) - len(interface.outputs),
            _interface=interface,
            _ranges=size_ranges(program),
            _indices=indices,
            _device=device,
            _upcast=upcast,
        )
        if device == CPU:
            return backend
        graphs = read_settings(config, path).cuda_graphs
        if graphs is None:  # variable lengths without buckets have too many shapes to record
            graphs = BUCKETS in config.parameters or interface.is_steady(batched=config.max_batch_size > 0)
        runs = DeviceRuns(backend.compute, CudaStream(placement.device_id), records=graphs)
        return replace(backend, _device_runs=runs)


@dataclass(frozen=True, kw_only=True)
class TorchBackend:
    provider: str  # "torch on cpu" or "torch on cuda:0"
    precision: str  # precision of the computation, in words
    _program: torch.fx.GraphModule
    _arguments: list[Any]  # weights and constants; None in the place of an input
    _changing: Sequence[int]  # places in `_arguments` of tensors that the program writes to
    _places: Mapping[str, int]  # places of the inputs in `_arguments`
    _dtypes: Mapping[str, np.dtype[Any]]
    _skipped: int  # number of outputs before the user's, which the program would have written to its buffers
    _interface: ModelInterface
    _ranges: tuple[SizeRange, ...]
    _indices: Mapping[str, IndexRange]
    _device: torch.device
    _upcast: bool
    _device_runs: DeviceRuns | None = None  # None on the CPU

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        """Return the client's dtype, because torch converts faster than NumPy."""
        return self._dtypes[name]

    @torch.inference_mode()
    def run(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the dtypes of the program's interface. Raises InvalidArgumentError: the program was not
        exported for such a size, or an index is out of its table's range; BackendError: torch refused these inputs.
        """
        if self._device != CPU:
            settle_thread(self._device.index)
        check_sizes(self._ranges, inputs)
        if self._device != CPU:  # on a device, a wrong index costs the process its device
            check_indices(self._indices, inputs)
        tensors = {name: as_tensor(array) for name, array in inputs.items()}
        if self._upcast:
            tensors = {name: upcast_tensor(tensor) for name, tensor in tensors.items()}
        try:
            outputs = self.compute(tensors) if self._device_runs is None else self._device_runs.run(tensors)
            return {
                spec.name: as_array(tensor, spec.datatype.array_dtype)
                for spec, tensor in zip(self._interface.outputs, outputs, strict=True)
            }
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            check_indices(self._indices, inputs)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BackendError(f"the model failed on this request: {reason}") from error

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute every output from inputs by name, all on the device."""
        arguments = list(self._arguments)
        for place in self._changing:  # no state passes from one request to the next
            arguments[place] = arguments[place].clone()
        for name, tensor in tensors.items():
            arguments[self._places[name]] = tensor
        outputs: Sequence[torch.Tensor] = self._program(*arguments)[self._skipped :]
        return outputs

    def give_up(self) -> None:
        """Do nothing: torch cannot interrupt a run."""


for _name in ("torch.export", "torch.export.pt2_archive._package"):
    logging.getLogger(_name).addFilter(lambda record: not str(record.msg).startswith(UNREADABLE_WARNINGS))


def _file(path: Path) -> _File | None:
    try:
        status = path.stat()
    except OSError:  # reported on reading
        return None
    return path, status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> ExportedProgram:
    try:
        with _weights_only():
            return torch.export.load(path)
    except UnpicklingError:
        raise ModelLoadError(
            f"{path}: holds pickled objects other than tensors, which are not loaded; export the program with weights, "
            "constants and example inputs that are plain tensors"
        ) from None
    except Exception as error:
        # Exceptions of zipfile, json, pickle and torch.
        said = str(error).partition("Please check the warnings")[0].strip()
        reason = (said or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"{path}: is not a readable exported program ({reason}); write it with torch.export.save of torch "
            f"{torch.__version__}"
        ) from error


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let every `torch.load` of this process read only tensors in this context: `torch.export.load` allows any pickle."""
    with _environment:
        before = {name: os.environ.pop(name, None) for name in (FORCE_WEIGHTS_ONLY, FORCE_ANYTHING)}
        os.environ[FORCE_WEIGHTS_ONLY] = "1"
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def chosen_device(path: Path, placement: DevicePlacement) -> torch.device:
    """Return the CUDA device of a placement if it may be used and is there, otherwise the CPU.
    Raises ModelLoadError: a GPU is required, and torch sees none.
    """
    if placement.use_gpu and placement.device_id < torch.cuda.device_count():
        return torch.device("cuda", placement.device_id)
    if placement.require_gpu:
        raise ModelLoadError(f"{path}: a GPU is required, but torch sees no CUDA device {placement.device_id}; {ALLOW_CPU}")
    return CPU


def _argument(program: ExportedProgram, spec: Any, *, upcast: bool) -> Any:
    if spec.kind is USER_INPUT:
        return spec.arg.value if isinstance(spec.arg, ConstantArgument) else None
    held = program.state_dict if spec.target in program.state_dict else program.constants
    value = held[spec.target]
    return upcast_tensor(value) if upcast and isinstance(value, torch.Tensor) else value


def set_threads(asked: int | None, placement: DevicePlacement) -> None:
    """Set the number of threads on the CPU, which is one for all models of the process."""
    threads = (placement.threads if asked is None else asked) or fewer_cores()
    if threads:
        torch.set_num_threads(threads)


def as_tensor(array: Array) -> torch.Tensor:
    """Copy an array into a tensor: it is a view of a request's bytes, and a program may write to its inputs."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def as_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Return a tensor as an array of a dtype, on the CPU."""
    if dtype.name == "bfloat16":
        return tensor.bfloat16().view(torch.int16).cpu().numpy().view(dtype)
    wanted = torch.from_numpy(np.empty(0, dtype)).dtype
    return tensor.to(wanted).cpu().numpy()
