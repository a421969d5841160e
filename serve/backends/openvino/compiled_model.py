"""A model that OpenVINO has compiled, behind the engine's backend interface."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from openvino import opset13

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.request_errors import IndexRange, check_indices, free_sizes
from halfserve.serve.backends.openvino.plugin import Compilation, input_places, place_of, reason_of, reports_errors
from halfserve.serve.engine.backend import ONNX, OPENVINO_PROVIDER, ModelInterface
from halfserve.serve.engine.errors import InstanceLostError, InvalidArgumentError, ModelLoadError, is_out_of_memory
from halfserve.serve.engine.tensors import Array, Tensors

# Number of rows for which sizes are inferred: no graph has it as a constant size. If it fits, other numbers do too.
ROWS = 7
MOST_KNOWN = 4096  # most combinations of sizes that are remembered
FEW = 16  # most elements of a constant that may be a size
Sizes = tuple[tuple[int, ...], ...]


class SizeCheck:
    """Checks whether a model can compute inputs of given sizes, by a copy of its graph without weights. Used by one thread.

    A try with the plugin is not possible: a batch whose sizes do not fit breaks the compiled model, and if a Reshape has a
    fixed size, OpenVINO 2026.4.1 writes beyond its memory (400 numbers for a Reshape to [2, 2]). The shapes of all tensors are
    inferred instead, once for each new combination of sizes: 1.7 ms for a MiniLM. `ov.Model.reshape` would take 13 ms, because
    it also looks for patterns to rewrite.
    """

    def __init__(self, model: ov.Model, interface: ModelInterface, places: Mapping[str, int]) -> None:
        """`places`: numbers of the inputs in the model, by their names. Raises InvalidArgumentError: all of the model's sizes
        are known except the number of rows, and it cannot compute any number.
        """
        self._graph = _without_weights(model)
        self._places = places
        self._batched = interface.batched
        self._known: set[Sizes] = set()
        self._is_open = any(free_sizes(interface, batched=interface.batched))
        if interface.batched and not self._is_open:
            self._infer(tuple((ROWS, *spec.shape[1:]) for spec in interface.inputs if spec.name in self._places))

    def check(self, inputs: Tensors) -> None:
        """Check the sizes of a batch. Raises InvalidArgumentError: the model cannot compute these sizes."""
        if not self._is_open:
            return
        shapes = tuple(inputs[name].shape for name in self._places)
        if self._batched and len({shape[:1] for shape in shapes}) == 1:
            shapes = tuple((ROWS, *shape[1:]) for shape in shapes)
        if shapes in self._known:
            return
        try:
            self._infer(shapes)
        except InvalidArgumentError as error:
            given = ", ".join(f"{name!r} {list(inputs[name].shape)}" for name in self._places)
            raise InvalidArgumentError(
                f"the model cannot compute inputs of these sizes: {given}; expected sizes that fit each other and the model "
                f"({error})"
            ) from None
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(shapes)

    def _infer(self, shapes: Sizes) -> None:
        parameters = self._graph.get_parameters()
        try:
            for place, shape in zip(self._places.values(), shapes, strict=True):
                parameters[place].set_partial_shape(ov.PartialShape(list(shape)))
            self._graph.validate_nodes_and_infer_types()
        except Exception as error:
            # The bindings raise RuntimeErrors and others, without a common base class.
            raise InvalidArgumentError(reason_of(error)) from error


def _without_weights(model: ov.Model) -> ov.Model:
    """Copy a graph, with an input in place of each constant from which no size is computed."""
    graph = model.clone()
    added = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "Constant" or not node.get_output_element_type(0).is_real():
            continue
        shape = list(node.get_output_shape(0))
        if math.prod(shape) > FEW:
            weight = opset13.parameter(shape, node.get_output_element_type(0))
            for taker in node.output(0).get_target_inputs():
                taker.replace_source_output(weight.output(0))
            added.append(weight)
    graph.add_parameters(added)
    return graph


# Up to this size a copy costs less than separate memory for the answer, or a view of the request's memory.
SMALL_BYTES = 65_536
BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
INT32 = np.iinfo(np.int32)
# Integers that OpenVINO's plugin computes with 32 bits: larger values would be changed.
NARROWED = frozenset({np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.uint32)})


@dataclass(eq=False)
class _Output:
    place: int  # number of the output in the model
    element: ov.Type  # element type in the model
    dtype: np.dtype[Any]  # dtype of the arrays that clients get
    empty: Sequence[int] | None  # smallest shape; None if the rank is open, so that its answers are copied
    is_large: bool = False  # whether an answer was too large to be copied, so that each gets memory of its own

    def prepare(self, request: ov.InferRequest) -> None:
        """Prepare a run: give the output memory that no other answer has, if that is cheaper than a copy."""
        if self.is_large and self.empty is not None:
            request.set_output_tensor(self.place, ov.Tensor(self.element, ov.Shape(self.empty)))

    def take(self, request: ov.InferRequest) -> Array:
        """Return the output after a run, in an array that the next run does not change."""
        tensor = request.get_output_tensor(self.place)
        data: Array = tensor.data
        if self.element == ov.Type.bf16:  # the bindings show bf16 as fp16
            data = data.view(BF16)
        if data.dtype != self.dtype:
            # fp32 values beyond bf16's range become infinity, as they would in bf16.
            with np.errstate(over="ignore"):
                return data.astype(self.dtype)
        if self.is_large and self.empty is not None:
            return data
        self.is_large = data.nbytes >= SMALL_BYTES
        return data.copy()


@dataclass(eq=False, kw_only=True)
class OpenVinoBackend:
    """One compiled model with the one request that it computes."""

    provider: str = OPENVINO_PROVIDER  # see `Backend`
    precision: str  # precision of the computation, in words
    compiled: ov.CompiledModel  # the compiled model
    _request: ov.InferRequest
    _places: Mapping[str, int]  # numbers of the inputs in the compiled model
    _elements: Mapping[str, ov.Type]
    _dtypes: Mapping[str, np.dtype[Any]]
    _narrowed: frozenset[str]  # inputs whose integers must fit into 32 bits
    _outputs: Mapping[str, _Output]
    _ranges: Mapping[str, IndexRange]
    _sizes: SizeCheck
    _waits: bool  # whether a run waits for a thread of OpenVINO that computes
    _is_broken: bool = False

    @classmethod
    def of(
        cls,
        compilation: Compilation,
        interface: ModelInterface,
        config: ModelConfig,
        ranges: Mapping[str, IndexRange],
        given_names: Mapping[str, str],
    ) -> OpenVinoBackend:
        """Make the backend; the configuration's parameters get the numbers of the model's nodes by their precision.

        The plugin answers zeros for indices out of `ranges`. `given_names`: see `PreparedModel`.

        Raises ModelLoadError: OpenVINO has other outputs, or cannot compute every number of rows.
        """
        config.parameters["halfserve.nodes"].string_value = compilation.nodes_in_words
        compiled = compilation.compiled
        own = [given_names.get(spec.name, spec.name) for spec in interface.inputs]
        found = input_places(compiled.inputs, own)
        places = {interface.inputs[number].name: place for number, place in found.items()}
        elements = {name: compiled.inputs[place].get_element_type() for name, place in places.items()}
        dtypes = {spec.name: spec.datatype.array_dtype for spec in interface.inputs}
        dtypes |= {name: _dtype(element) for name, element in elements.items()}
        outputs = {}
        for number, spec in enumerate(interface.outputs):
            # Equal tensors of an ONNX graph share their names, so that its outputs are identified by their order.
            place = number if interface.kind is ONNX else place_of(compiled.outputs, spec.name)
            if place is None:
                raise ModelLoadError(f"output {spec.name!r} is not in the model that OpenVINO has read; save the model again")
            outputs[spec.name] = _output(place, compiled.outputs[place], spec.datatype.array_dtype)
        try:
            sizes = SizeCheck(compilation.model, interface, places)
        except InvalidArgumentError as error:
            raise ModelLoadError(f"OpenVINO cannot compute every number of rows: {error}; convert the model again") from None
        return cls(
            precision=compilation.precision,
            compiled=compiled,
            _request=compiled.create_infer_request(),
            _places=places,
            _elements=elements,
            _dtypes=dtypes,
            _narrowed=frozenset(name for name, dtype in dtypes.items() if dtype in NARROWED and name not in ranges),
            _outputs=outputs,
            _ranges=ranges,
            _sizes=sizes,
            # A limit of the time needs runs that can be cancelled from another thread, which costs each 0.1 ms.
            _waits="halfserve.max_compute_s" in config.parameters or not reports_errors(compiled),
        )

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return self._dtypes[name]

    def run(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the dtypes of the model's interface.

        Raises:
            InvalidArgumentError: an index is out of its table's range, an integer needs more than 32 bits, or sizes do not fit.
            OutOfMemoryError: memory ran out.
            InstanceLostError: OpenVINO failed for another reason, after which this copy may answer wrongly.
        """
        if self._is_broken:
            raise InstanceLostError("an earlier batch has failed")
        check_indices(self._ranges, inputs)
        for name in self._narrowed:
            _require_narrow(name, inputs[name])
        self._sizes.check(inputs)
        request, outputs = self._request, self._outputs
        try:
            given = [self._set(name, inputs[name]) for name in self._places]
            for output in outputs.values():
                output.prepare(request)
            if self._waits:
                request.start_async()
                request.wait()
            else:
                request.infer(share_outputs=True)
        except Exception as error:
            # The bindings raise RuntimeErrors and others, without a common base class.
            self._is_broken = True
            if is_out_of_memory(error):
                raise
            raise InstanceLostError(f"OpenVINO failed: {reason_of(error)}") from error
        del given  # it kept the memory alive that the request has read
        return {name: output.take(request) for name, output in outputs.items()}

    def give_up(self) -> None:
        """End a run before its next node, if the compute time is limited; a loop is one node."""
        self._request.cancel()

    def _set(self, name: str, array: Array) -> Array:
        """Let the request read an array, which must live until the run has ended."""
        array = _shareable(array)
        element = self._elements[name]
        if element == ov.Type.bf16:
            tensor = ov.Tensor(array.view(np.uint16), array.shape, element)
        else:
            tensor = ov.Tensor(array, shared_memory=True)
        self._request.set_input_tensor(self._places[name], tensor)
        return array


def _dtype(element: ov.Type) -> np.dtype[Any]:
    return BF16 if element == ov.Type.bf16 else np.dtype(element.to_dtype())


def _output(place: int, port: ov.ConstOutput, dtype: np.dtype[Any]) -> _Output:
    shape = port.get_partial_shape()
    empty = None if shape.rank.is_dynamic else [size.get_min_length() for size in shape]
    return _Output(place, port.get_element_type(), dtype, empty)


def _shareable(array: Array) -> Array:
    """Return the array, or a writeable one with its memory: the bindings refuse read-only arrays, but only read them."""
    if array.flags.writeable and array.flags.c_contiguous:
        return array
    if array.nbytes < SMALL_BYTES or not array.flags.c_contiguous:
        return np.array(array, order="C")
    memory = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    shared: Array = np.ndarray(array.shape, array.dtype, buffer=memoryview(memory))
    return shared


def _require_narrow(name: str, array: Array) -> None:
    """Check that integers fit into 32 bits. Raises InvalidArgumentError: an integer does not fit."""
    if not array.size:
        return
    least, most = int(array.min()), int(array.max())
    if least < INT32.min or most > INT32.max:
        value = most if most > INT32.max else least
        raise InvalidArgumentError(
            f"input {name!r} has the value {value}, expected {INT32.min} to {INT32.max}: OpenVINO computes with 32-bit integers"
        )
