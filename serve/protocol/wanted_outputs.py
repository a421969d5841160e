"""Which outputs a client wants, and how: sent as they are, left in shared memory, or as the names of their best classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.datatypes import BY_WIRE
from protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from serve.engine.errors import InvalidArgumentError
from serve.engine.model import Model
from serve.engine.tensors import Tensors
from serve.protocol.classification import classify
from serve.protocol.raw_tensors import raw_view, to_raw
from serve.protocol.response_parameters import parameters_of
from serve.protocol.shared_memory import Place, SharedMemory
from serve.protocol.shared_tensors import place_of, tell_place

CLASSIFICATION = "classification"
BYTES = BY_WIRE["BYTES"]


@dataclass(frozen=True, kw_only=True)
class WantedOutput:
    """One output that is not just sent.

    Attributes:
        place: where to leave it in shared memory; None sends it.
        classes: how many of the best classes to name; None for the numbers themselves.
    """

    place: Place | None
    classes: int | None


def wanted_names(request: ModelInferRequest, model: Model) -> tuple[str, ...]:
    """The outputs to answer, in the client's order; all of them when it names none. One that comes twice is answered once.

    Raises:
        InvalidArgumentError: an output that the model does not have, or one that is wanted in two ways.
    """
    if not request.outputs:
        return tuple(model.outputs)
    wanted: dict[str, ModelInferRequest.InferRequestedOutputTensor] = {}
    for output in request.outputs:
        name = output.name
        if name not in model.outputs:
            known = ", ".join(map(repr, model.outputs))
            raise InvalidArgumentError(f"output {name!r} is not one of the model's: {known}")
        if wanted.setdefault(name, output) != output:
            raise InvalidArgumentError(f"output {name!r} is named twice, with other parameters; expected one way to answer it")
    return tuple(wanted)


def wanted_specially(request: ModelInferRequest, model: Model, memory: SharedMemory) -> dict[str, WantedOutput]:
    """The outputs of a checked request that are not just sent, by name.

    Raises:
        InferenceError: a parameter makes no sense, or a place is none (see `SharedMemory.check`).
    """
    wanted = {}
    for output in request.outputs:
        if not output.parameters:
            continue
        what = f"output {output.name!r}"
        place, classes = place_of(what, output.parameters), _classes(what, output.parameters)
        if classes is not None and model.outputs[output.name].datatype is BYTES:
            raise InvalidArgumentError(
                f"{what} has datatype BYTES, expected numbers to classify by; leave {CLASSIFICATION} out"
            )
        if place is not None:
            memory.check(place)
        if place is not None or classes is not None:
            wanted[output.name] = WantedOutput(place=place, classes=classes)
    return wanted


def special_response(
    model: Model, request_id: bytes, outputs: Tensors, wanted: Mapping[str, WantedOutput], memory: SharedMemory, since: int
) -> bytes:
    """The answer to a request of which some outputs are wanted specially.

    An output in shared memory has an empty raw entry, and parameters that say where it is. `since`: see `SharedMemory.check`.

    Raises:
        InferenceError: an output does not fit its place, or its region is gone.
    """
    response = ModelInferResponse(model_name=model.name, model_version=str(model.version), id=request_id.decode())
    for name, array in outputs.items():
        spec, special = model.outputs[name], wanted.get(name)
        tensor, datatype = spec.to_client(array), spec.datatype
        if special is not None and special.classes is not None:
            labels = model.labels.get(name, ())
            tensor, datatype = classify(tensor, special.classes, labels, batched=model.max_batch_size > 0), BYTES
        entry = response.outputs.add(name=name, datatype=datatype.wire, shape=tensor.shape)
        if special is None or special.place is None:
            response.raw_output_contents.append(to_raw(tensor, datatype))
            continue
        view = raw_view(tensor, datatype)
        memory.write(special.place, view, since=since)
        tell_place(entry.parameters, special.place, len(view))
        response.raw_output_contents.append(b"")
    return response.SerializeToString() + parameters_of(outputs)


def _classes(what: str, parameters: Any) -> int | None:
    if CLASSIFICATION not in parameters:
        return None
    parameter = parameters[CLASSIFICATION]
    choice = parameter.WhichOneof("parameter_choice")
    count: int = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    if count < 0:
        raise InvalidArgumentError(f"{what}: parameter {CLASSIFICATION} is no whole number, expected how many classes to name")
    return count or None  # 0 is the protocol's "none"
