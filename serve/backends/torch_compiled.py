"""Programs that AOTInductor compiled: archives of `torch._inductor.aoti_compile_and_package`, with a library of machine code.

The library is called through its C interface (torch/csrc/inductor/aoti_runtime/interface.h): torch's own loader holds the
interpreter lock for the whole computation. Only files named torch_* import torch.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import shutil
import tempfile
import weakref
import zipfile
from _ctypes import dlclose
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_size_t, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.cuda import settle_thread
from halfserve.serve.backends.onnx_runtime.session_settings import read_settings
from halfserve.serve.backends.torch_backend import CPU, as_array, as_tensor, chosen_device, set_threads
from halfserve.serve.backends.torch_program import WIRE
from halfserve.serve.engine.backend import COMPILED_FOLDER, TORCH_COMPILED, DevicePlacement, ModelInterface
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.repository.model_loading import OwnDeclaration, declared_interface
from halfserve.serve.engine.tensors import Array, Tensors, TensorSpec

# What AOTInductor records of the machine that it compiled for.
FACTS: Final = "wrapper_metadata.json"
DEVICE, MACHINE, PROCESSOR, CAPABILITY = "AOTI_DEVICE_KEY", "AOTI_MACHINE", "AOTI_CPU_ISA", "AOTI_COMPUTE_CAPABILITY"
# In the C++ source of a library, which checks its inputs only if an environment variable says so.
INPUT_TYPE: Final = re.compile(r"void check_input_(\d+)\(.*?_expected_dtype = aoti_torch_dtype_(\w+)\(\)", re.DOTALL)
REMEDY: Final = "compile it on a machine like this one"
WHERE: Final = "the server's standard error says why"

_tensors: Any = vars(torch._C)["_aoti"]  # noqa: SLF001  (converts tensors to pointers and back; torch has no public name)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]


Names: TypeAlias = tuple[str, ...]  # Triton's names of a tensor: by structure, such as "RESULT[logits]", then by position


class CompiledRuntime:
    """Loads programs that AOTInductor compiled, which are machine code: see `Runtimes`.

    Their files do not say shapes and types, so that a configuration has to declare them, by Triton's names for "torch_aoti".
    """

    def declared(self, config: DeclaredConfig) -> OwnDeclaration:
        """See `DeclaringRuntime`; `load` compares the declaration with the file.
        Raises ModelLoadError: an input or output has no datatype.
        """
        # As Triton reads it: without a max_batch_size it is 0, and dims are whole shapes.
        config = replace(config, says_batch_size=True)
        return OwnDeclaration(config, declared_interface(config, TORCH_COMPILED), has_rows=True)

    def describe(self, path: Path) -> ModelInterface:
        """See `Runtime`; a compiled program has its interface in its configuration.
        Raises ModelLoadError: always.
        """
        remedy = f"serve it as <model>/<version>/{path.name} with a config.pbtxt that declares its inputs and outputs"
        raise ModelLoadError(f"{path}: AOTInductor compiled it, and it does not say shapes and types; {remedy}")

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> CompiledBackend:
        """Load one copy on the kind of device that it was compiled for.
        Raises ModelLoadError: a setting is invalid, the configuration does not fit the file, or the device is missing.
        """
        facts = _facts(path)
        device = chosen_device(path, placement)
        if facts.get(DEVICE) != device.type:
            raise ModelLoadError(f"{path}: was compiled for {facts.get(DEVICE)!r}; compile it for {device.type!r}")
        _require_machine(path, facts, device)
        if device == CPU:
            set_threads(read_settings(config, path).intra_op_threads, placement)
        else:
            settle_thread(placement.device_id)
        program = CompiledProgram(path, device)
        inputs = _by_place(interface.inputs, program.inputs, f"{path}: input")
        outputs = _by_place(interface.outputs, program.outputs, f"{path}: output")
        for number, wire in _input_types(program.folder).items():
            if number in inputs and wire != inputs[number].datatype.wire:
                raise ModelLoadError(_wrong_type("input", inputs[number], wire))
        missing = [names[0] for number, names in enumerate(program.inputs) if number not in inputs]
        if missing or not outputs:
            found, known = ", ".join(missing) or "output", ", ".join(names[0] for names in program.outputs)
            remedy = f'declare every input, e.g. {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ 8 ] }}, and some of {known}'
            raise ModelLoadError(f"{path}: config.pbtxt declares no {found}; {remedy}")
        return CompiledBackend(
            provider=f"torch on {device}",
            precision="as compiled by AOTInductor",
            _program=program,
            _inputs=[inputs[number] for number in range(len(inputs))],
            _outputs=outputs,
            _device=device,
        )


class CompiledProgram:
    """A loaded library with one copy of its weights. It is unloaded when it is garbage.

    Attributes:
        inputs: names of each input, in the library's order.
        outputs: names of each output, in the library's order.
        folder: holds its unpacked files.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        """Load a library onto a device.
        Raises ModelLoadError: the archive has no library that can be loaded, or other arguments than tensors.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="halfserve-compiled-"))
        self._container = c_void_p()
        try:
            self._library = ctypes.CDLL(str(_unpacked(path, self.folder)))
        except (OSError, zipfile.BadZipFile) as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ModelLoadError(f"{path}: the compiled program cannot be loaded ({error}); compile it again") from None
        weakref.finalize(self, _unload, self._library, self._container, self.folder)
        status = self._library.AOTInductorModelContainerCreateWithDevice(
            byref(self._container), c_size_t(1), str(device).encode(), str(self.folder).encode()
        )
        if status != 0:
            raise ModelLoadError(f"{path}: the compiled program cannot be set up on {device}; {WHERE}")
        self.inputs, self.outputs = self._structure(path)

    def run(self, inputs: Sequence[torch.Tensor], stream: int) -> list[torch.Tensor]:
        """Compute all outputs on a CUDA stream (0 on the CPU), without the interpreter lock.
        Raises BackendError: the program refused these inputs.
        """
        capsules = _tensors.unsafe_alloc_void_ptrs_from_tensors(list(inputs))
        taken = (c_void_p * len(inputs))(*[_pointer_of(capsule, None) for capsule in capsules])
        given = (c_void_p * len(self.outputs))()
        status = self._library.AOTInductorModelContainerRun(
            self._container, taken, c_size_t(len(taken)), given, c_size_t(len(given)), c_void_p(stream), None
        )
        if status:
            raise BackendError(f"the model failed on this request; {WHERE}")
        return list(_tensors.alloc_tensors_by_stealing_from_void_ptrs([_capsule_of(one, None, None) for one in given]))

    def _structure(self, path: Path) -> tuple[list[Names], list[Names]]:
        taken, given, inputs, outputs = c_char_p(), c_char_p(), c_size_t(), c_size_t()
        self._library.AOTInductorModelContainerGetCallSpec(self._container, byref(taken), byref(given))
        self._library.AOTInductorModelContainerGetNumInputs(self._container, byref(inputs))
        self._library.AOTInductorModelContainerGetNumOutputs(self._container, byref(outputs))
        positional, by_name = json.loads(taken.value or b"")[1]["children_spec"]
        arguments = [*_leaves(positional, "ARGS"), *_leaves(by_name, "KWARGS")]
        results = list(_leaves(json.loads(given.value or b"")[1], "RESULT"))
        if (len(arguments), len(results)) != (inputs.value, outputs.value):
            raise ModelLoadError(f"{path}: has arguments or results that are no tensors; compile a program of tensors alone")
        return _named(arguments, "INPUT"), _named(results, "OUTPUT")


@dataclass(frozen=True, kw_only=True)
class CompiledBackend:
    provider: str  # "torch on cpu" or "torch on cuda:0"
    precision: str  # precision of the computation, in words
    _program: CompiledProgram
    _inputs: Sequence[TensorSpec]  # in the program's order
    _outputs: Mapping[int, TensorSpec]  # specifications by the position among the program's outputs
    _device: torch.device

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        """Return the declared dtype, which is the one that the program was compiled for."""
        return next(spec.datatype.array_dtype for spec in self._inputs if spec.name == name)

    @torch.inference_mode()
    def run(self, inputs: Tensors) -> Tensors:
        """Compute the declared outputs.
        Raises BackendError: the program refused these inputs, or an output has another type than the configuration declares.
        """
        if self._device != CPU:
            settle_thread(self._device.index)
        stream = 0 if self._device == CPU else torch.cuda.current_stream(self._device).cuda_stream
        results = self._program.run([as_tensor(inputs[spec.name]).to(self._device) for spec in self._inputs], stream)
        outputs: dict[str, Array] = {}
        for place, spec in self._outputs.items():
            found = WIRE.get(results[place].dtype, str(results[place].dtype))
            if found != spec.datatype.wire:
                raise BackendError(_wrong_type("output", spec, found))
            outputs[spec.name] = as_array(results[place], spec.datatype.array_dtype)
        return outputs

    def give_up(self) -> None:
        """Do nothing: a compiled program cannot be interrupted."""


def _facts(path: Path) -> Mapping[str, str]:
    """Return what AOTInductor recorded of the machine that it compiled for."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if COMPILED_FOLDER in name and name.endswith(FACTS))
            found: Any = json.loads(archive.read(name))
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        found = None
    if not isinstance(found, dict) or DEVICE not in found:
        raise ModelLoadError(
            f"{path}: does not say which device it was compiled for; compile it with torch {torch.__version__}"
        )
    return found


def _require_machine(path: Path, facts: Mapping[str, str], device: torch.device) -> None:
    """Check that this machine has the instructions of the program, which would end the process otherwise.
    Raises ModelLoadError: it lacks some.
    """
    needed = facts.get(MACHINE, "")
    if needed != platform.machine():
        raise ModelLoadError(f"{path}: was compiled for {needed!r}, and this machine is {platform.machine()!r}; {REMEDY}")
    if device != CPU:
        needed, own = facts.get(CAPABILITY, ""), "".join(map(str, torch.cuda.get_device_capability(device)))
        if needed not in {"", own}:
            raise ModelLoadError(f"{path}: was compiled for compute capability {needed}, and {device} has {own}; {REMEDY}")
    elif platform.machine() == "x86_64":
        has = {name.replace("_", "").upper() for name, there in torch.cpu.get_capabilities().items() if there is True}
        wanted = {"AVX512F" if name == "AVX512" else name.replace("_", "") for name in facts.get(PROCESSOR, "").split()}
        if wanted - has:
            raise ModelLoadError(
                f"{path}: was compiled for processors with {min(wanted - has)}, which this one lacks; {REMEDY}"
            )


def _unpacked(path: Path, folder: Path) -> Path:
    """Write the files of a program into a folder, and return its library.
    Raises OSError: the archive holds no library, or several programs, or constants apart from their library.
    """
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if COMPILED_FOLDER in name and not name.endswith("/")]
        libraries = [name for name in names if name.endswith(".so")]
        apart = [name for name in names if name.endswith((".blob", ".json")) and not name.endswith("_metadata.json")]
        if len(libraries) != 1 or apart:
            found = f"it holds {apart[0]!r}" if apart else f"it holds {len(libraries)} libraries"
            raise OSError(f"{found}, expected one library with its constants that calls no custom operators")
        for name in names:
            with archive.open(name) as source, (folder / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)
    return folder / Path(libraries[0]).name


def _input_types(folder: Path) -> dict[int, str]:
    """Return the types of the inputs by place, where the source of the library is there to say them."""
    sources = "".join(source.read_text() for source in folder.glob("*.wrapper.cpp"))
    names = {f"{dtype}".removeprefix("torch."): wire for dtype, wire in WIRE.items()}
    return {int(number): names[name] for number, name in INPUT_TYPE.findall(sources) if name in names}


def _wrong_type(what: str, spec: TensorSpec, found: str) -> str:
    return f"the model's {what} {spec.name!r} is {found}, and its data_type {spec.datatype.wire}; correct config.pbtxt"


def _unload(library: ctypes.CDLL, container: c_void_p, folder: Path) -> None:
    """Free a program's weights and files, and its library if its compiler made it so that it can be unmapped."""
    if container:
        library.AOTInductorModelContainerDelete(container)
    dlclose(library._handle)  # noqa: SLF001  (ctypes has no public way)
    shutil.rmtree(folder, ignore_errors=True)


def _leaves(tree: Mapping[str, Any], path: str | None) -> Iterator[str | None]:
    """Yield Triton's names of the tensors in a structure, as torch.utils._pytree writes it to JSON."""
    kind, children = tree["type"], tree["children_spec"]
    if kind is None:
        yield path
        return
    keys: Sequence[object] = json.loads(tree["context"]) if kind == "builtins.dict" else range(len(children))
    known = path is not None and kind in {"builtins.tuple", "builtins.list", "builtins.dict"}
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(child, f"{path}[{key}]" if known else None)


def _named(paths: Iterable[str | None], what: str) -> list[Names]:
    return [(path, f"{what}__{number}") if path else (f"{what}__{number}",) for number, path in enumerate(paths)]


def _by_place(specs: Iterable[TensorSpec], names: Sequence[Names], where: str) -> dict[int, TensorSpec]:
    """Return the declared tensors by their places in the program.
    Raises ModelLoadError: one has no place there, or two have the same.
    """
    found: dict[int, TensorSpec] = {}
    for spec in specs:
        number = next((number for number, known in enumerate(names) if spec.name in known), None)
        if number is None:
            expected = ", ".join(known[0] for known in names)
            raise ModelLoadError(f"{where} {spec.name!r} of its configuration is not there, expected some of {expected}")
        if number in found:
            raise ModelLoadError(f"{where} {found[number].name!r} is declared again as {spec.name!r}; keep one of them")
        found[number] = spec
    return found
