"""ONNX Runtime behind the engine's backend interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe
from halfserve.serve.backends.onnx_runtime.cuda import DeviceSession, GraphReplays, copies_of, wait_asleep
from halfserve.serve.backends.onnx_runtime.cuda_errors import reason_of
from halfserve.serve.backends.onnx_runtime.device_feeds import Feed, run_session
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_interface import read_interface
from halfserve.serve.backends.onnx_runtime.request_errors import RequestErrors, free_sizes, index_ranges
from halfserve.serve.backends.onnx_runtime.session import (
    CPU,
    DENORMALS,
    OpenSession,
    SessionOpener,
    nodes_by_provider,
    warn_if_in_vain,
)
from halfserve.serve.backends.onnx_runtime.session_settings import (
    OPTIMIZATION_LEVEL,
    OptimizationLevel,
    SessionSettings,
    operator_libraries,
    read_settings,
)
from halfserve.serve.backends.onnx_runtime.shared_weights import has_convolutions
from halfserve.serve.engine.backend import DevicePlacement, ModelInterface
from halfserve.serve.engine.config.batching import declared_padded_rows, few_sizes
from halfserve.serve.engine.config.parameters import PADDED_ROWS
from halfserve.serve.engine.errors import BackendError, InstanceLostError, InvalidArgumentError
from halfserve.serve.engine.execution.device_inputs import DeviceInputs, DeviceReadError
from halfserve.serve.engine.tensors import Array, Tensors

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float16)": np.dtype(np.float16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(string)": np.dtype(object),
    **{f"tensor({sign}int{bits})": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class OnnxRuntime:
    def __init__(self, probe: CrashProbe | None = None, *, trust_custom_operators: bool = False) -> None:
        """`probe` loads models in another process first; None loads them without a trial.

        Libraries of custom operators can run any code as this process's user; `trust_custom_operators` permits loading the ones
        that lie in the repository.
        """
        self._probe = probe
        self._trust_custom_operators = trust_custom_operators

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface without its weights.
        Raises ModelLoadError: the file is missing, is not ONNX, or has inputs without a wire type.
        """
        return read_interface(path)

    def load(
        self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig
    ) -> OnnxRuntimeBackend:
        """Load one copy, on the CUDA device if there is one and it may be used, otherwise on the CPU.

        A reduced optimization level is recorded in the configuration's parameters.

        Raises:
            ModelLoadError: a setting is invalid, the runtime refuses the model, the model crashes its process, or a required
                GPU cannot be used.
        """
        libraries = operator_libraries(config, path, trusted=self._trust_custom_operators)
        settings = replace(read_settings(config, path), operator_libraries=libraries)
        rows, sizes = max(1, config.max_batch_size), few_sizes(config)
        with open_onnx(path) as file:
            indices = index_ranges(file.model.graph)
            sizes = sizes if has_convolutions(file.model) else ()
        opened = SessionOpener(
            path=path, placement=placement, settings=settings, probe=self._probe, rows=rows, sizes=sizes
        ).open()
        padded = sizes if opened.records_graphs else tuple(opened.by_rows)
        if padded and declared_padded_rows(config) is None:
            config.parameters[PADDED_ROWS].string_value = ",".join(map(str, padded))
        if settings.session_entries.get(DENORMALS) == "1":
            warn_if_in_vain(opened.session, path)
        if opened.level is not OptimizationLevel.ALL:
            config.parameters[OPTIMIZATION_LEVEL].string_value = opened.level.label
        config.parameters["halfserve.nodes"].string_value = nodes_by_provider(opened.session)
        free = tuple(free_sizes(interface, batched=config.max_batch_size > 0))
        errors = RequestErrors(indices, free, on_device=opened.provider != CPU)
        if opened.provider != CPU and "blocking" in settings.cuda_ways:
            wait_asleep(placement.device_id)
        return OnnxRuntimeBackend.of(opened, interface, placement.device_id, settings, errors)


@dataclass(frozen=True, kw_only=True)
class OnnxRuntimeBackend:
    """A model in one session."""

    provider: str  # name of the provider that computes, as ONNX Runtime reports it
    precision: str  # precision of the computation, in words
    _session: ort.InferenceSession
    _by_rows: Mapping[int, ort.InferenceSession]  # the sessions for these numbers of rows, instead of `_session`
    _run_options: Any
    _compute_dtypes: Mapping[str, np.dtype[Any]]
    _given_names: Mapping[str, str]  # the session's names of the inputs, by the interface's names
    _wanted_names: Sequence[str]
    _output_dtypes: Mapping[str, np.dtype[Any]]
    _texts: Sequence[str]
    _casts: Mapping[str, np.dtype[Any]]  # outputs that the session gives in another dtype, with the interface's dtype
    _replays: GraphReplays | None
    _device_session: DeviceSession | None  # None for a session on the CPU
    _errors: RequestErrors

    @classmethod
    def of(
        cls, opened: OpenSession, interface: ModelInterface, device_id: int, settings: SessionSettings, errors: RequestErrors
    ) -> OnnxRuntimeBackend:
        session = opened.session
        given = {spec.name: opened.given_names.get(spec.name, spec.name) for spec in interface.inputs}
        dtypes = {value.name: NUMPY_DTYPES[value.type] for value in session.get_inputs()}
        outputs = {spec.name: spec.datatype.array_dtype for spec in interface.outputs}
        got = [NUMPY_DTYPES[value.type] for value in session.get_outputs()]
        options = ort.RunOptions()
        if settings.arena_shrinkage:
            options.add_run_config_entry(ARENA_SHRINKAGE, settings.arena_shrinkage)
        copies = copies_of(device_id, by_driver="copies" in settings.cuda_ways)
        return cls(
            provider=opened.provider,
            precision=opened.precision,
            _session=session,
            _by_rows=opened.by_rows,
            _run_options=options,
            _compute_dtypes={name: dtypes[own] for name, own in given.items()},
            _given_names=given,
            _wanted_names=[value.name for value in session.get_outputs()],
            _output_dtypes=outputs,
            _texts=[spec.name for spec in interface.inputs if spec.datatype.array_dtype.hasobject],
            _casts={name: dtype for (name, dtype), now in zip(outputs.items(), got, strict=True) if dtype != now},
            _replays=GraphReplays(session, "cuda", device_id, copies=copies) if opened.records_graphs else None,
            _device_session=DeviceSession([session, *opened.by_rows.values()], device_id) if opened.provider != CPU else None,
            _errors=errors,
        )

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return self._compute_dtypes[name]

    @property
    def records_graphs(self) -> bool:
        """Whether it records CUDA graphs, and none of the latest attempts failed."""
        return self._replays is not None and not self._replays.has_failed

    def run(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the dtypes of the model's interface.

        Raises:
            InvalidArgumentError: a BYTES element is not UTF-8, as ONNX Runtime's strings are.
            InvalidArgumentError: an index is out of its table's range, or sizes do not fit.
            BackendError: the runtime refused these inputs for another reason; its cause is an InstanceLostError where the
                device is lost.
        """
        names = self._given_names
        if type(inputs) is DeviceInputs:  # isinstance takes ten times as long for a subclass of Mapping
            if self._device_session is not None and not self._errors.checks_first:
                with suppress(DeviceReadError):  # the copy to the host shows which request is at fault
                    return self._computed(inputs, {names[name]: rows for name, rows in inputs.rows.items()})
            inputs = dict(inputs)  # copied once, so that what is checked is what is computed
        if self._errors.checks_first:
            self._errors.check(inputs)
        feeds: dict[str, Feed] = {names[name]: array for name, array in inputs.items()}
        for name in self._texts:
            feeds[names[name]] = _as_text(name, inputs[name])
        return self._computed(inputs, feeds)

    def _computed(self, inputs: Tensors, feeds: Mapping[str, Feed]) -> Tensors:
        if self._device_session is not None:
            self._device_session.enter()
        arrays: Any
        try:
            if self._device_session is None:
                arrays = self._session.run(self._wanted_names, feeds, self._run_options)
            elif self._replays is None:
                session = self._by_rows.get(len(next(iter(feeds.values()))), self._session) if self._by_rows else self._session
                arrays = run_session(session, self._wanted_names, feeds, self._run_options)
            else:
                arrays = self._replays.run(feeds)
        except DeviceReadError:
            raise
        except Exception as error:
            # The runtime's exceptions have no common base class.
            reason = reason_of(error)
            if self._device_session is not None and self._device_session.is_lost():
                lost = InstanceLostError(reason)
                lost.__cause__ = error
                raise BackendError(f"the model failed on this request: {reason}") from lost
            raise self._errors.explain(inputs, reason) from error
        self._errors.has_computed = True
        outputs = dict(zip(self._output_dtypes, arrays, strict=True))
        if self._casts:
            # fp32 values beyond bf16's range become infinity, as they would in bf16.
            with np.errstate(over="ignore"):
                outputs.update((name, outputs[name].astype(dtype)) for name, dtype in self._casts.items())
        return outputs

    def give_up(self) -> None:
        """End a run before its next node or loop iteration. Replays of CUDA graphs end by themselves."""
        self._run_options.terminate = True


def _as_text(name: str, array: Array) -> Array:
    text = np.empty(array.size, object)
    try:
        text[:] = [element.decode() if isinstance(element, bytes) else element for element in array.ravel()]
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            f"input {name!r} has a BYTES element that is not UTF-8, expected text; models take other bytes as UINT8"
        ) from None
    return text.reshape(array.shape)
