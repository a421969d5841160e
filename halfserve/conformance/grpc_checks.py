"""Checks of the protocol over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from halfserve.conformance.checks import ConformanceCheck, NotOfferedError, ViolationError, expect
from halfserve.conformance.target_models import WIDTHS, TargetModel, model_of, same_values, unpacked
from halfserve.protos import inference_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/Check"
SECONDS = 30.0
UNKNOWN = "no-such-model-or-tensor"
OIP, TRITON, GRPC = "Open Inference Protocol, gRPC: ", "Triton's extension: ", "gRPC: "
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
# Triton says UNAVAILABLE of a model that it does not have.
UNKNOWN_MODEL = (*REFUSALS, grpc.StatusCode.UNAVAILABLE)


@dataclass(frozen=True)
class GrpcTarget:
    """A server's port; calls fail with grpc.RpcError."""

    channel: grpc.Channel

    def call(self, rpc: str, request: Any, answer: Any = None, **options: Any) -> Any:
        """Call one RPC with a message or its bytes; the answer's class follows from the RPC's name."""
        found = answer or getattr(pb, f"{rpc}Response", pb.ServerLiveResponse)
        sent = request if isinstance(request, bytes) else request.SerializeToString()
        path = rpc if rpc.startswith("/") else SERVICE + rpc
        return self.channel.unary_unary(path, None, found.FromString)(sent, timeout=SECONDS, **options)

    def offered(self, rpc: str, request: Any, **options: Any) -> Any:
        """Call an RPC of an extension, which a server may lack."""
        try:
            return self.call(rpc, request, **options)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise NotOfferedError(f"{rpc} is UNIMPLEMENTED") from None
            raise

    def refuse(self, rpc: str, request: Any, codes: Sequence[grpc.StatusCode] = REFUSALS) -> None:
        """Expect one of the status codes."""
        try:
            self.call(rpc, request)
        except grpc.RpcError as error:
            expect(error.code() in codes, " or ".join(code.name for code in codes), f"{error.code().name}: {error.details()}")
        else:
            raise ViolationError(f"expected {' or '.join(code.name for code in codes)}, got an answer")


def infer_request(model: TargetModel, *, is_raw: bool = True, **fields: Any) -> Any:
    """Return a ModelInferRequest whose elements are all 1."""
    request = pb.ModelInferRequest(model_name=model.name, **fields)
    for tensor in model.inputs:
        made = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.sent_shape)
        if is_raw:
            request.raw_input_contents.append(tensor.raw)
        else:
            is_text = tensor.datatype == "BYTES"
            values = [value.encode() for value in tensor.values] if is_text else tensor.values
            getattr(made.contents, WIDTHS[tensor.datatype][0]).extend(values)
    return request


def output_values(response: Any) -> dict[str, list[Any]]:
    """Return the outputs' elements by name, of raw or typed contents."""
    found = {}
    for index, output in enumerate(response.outputs):
        if response.raw_output_contents:
            found[output.name] = unpacked(response.raw_output_contents[index], output.datatype)
        else:
            held = list(getattr(output.contents, WIDTHS[output.datatype][0]))
            found[output.name] = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in held]
    return found


def listed_models(target: GrpcTarget) -> list[str]:
    """Return the names of the models that are ready, where the server lists them."""
    try:
        index = target.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    except grpc.RpcError:
        return []
    return list(dict.fromkeys(model.name for model in index.models))


def described_model(target: GrpcTarget, name: str) -> TargetModel:
    """Return a model by its metadata."""
    return model_of(target.call("ModelMetadata", pb.ModelMetadataRequest(name=name)), name)


def grpc_checks(target: GrpcTarget, models: Sequence[TargetModel]) -> Iterator[ConformanceCheck]:
    """Yield the checks; those of errors ask the first model."""
    yield from (
        ConformanceCheck(name=f"grpc.{name}", clause=clause, run=run) for name, clause, run in _ServerChecks(target).rows()
    )
    for model in models:
        checks = _ModelChecks(target, model)
        parts = [*checks.of_each_model(), *(checks.of_one_model() if model is models[0] else ())]
        yield from (ConformanceCheck(name=f"grpc.{name}[{model.name}]", clause=clause, run=run) for name, clause, run in parts)


Row = tuple[str, str, Callable[[], None]]


class _ServerChecks:
    def __init__(self, target: GrpcTarget) -> None:
        self._target = target

    def rows(self) -> list[Row]:
        """Checks that need no model."""
        return [
            ("server_live", OIP + "Server Live", self._live),
            ("server_ready", OIP + "Server Ready", self._ready),
            ("server_metadata", OIP + "Server Metadata", self._metadata),
            ("model_ready.unknown", OIP + "Model Ready", self._unknown_model_ready),
            (
                "model_metadata.unknown",
                OIP + "Model Metadata",
                lambda: self._target.refuse("ModelMetadata", pb.ModelMetadataRequest(name=UNKNOWN), UNKNOWN_MODEL),
            ),
            (
                "infer.unknown_model",
                OIP + "Inference, status of an error",
                lambda: self._target.refuse("ModelInfer", pb.ModelInferRequest(model_name=UNKNOWN), UNKNOWN_MODEL),
            ),
            ("unknown_fields", "Protocol Buffers: unknown fields are kept or ignored", self._unknown_fields),
            ("unknown_method", GRPC + "status UNIMPLEMENTED", self._unknown_method),
            ("not_a_message", GRPC + "a request that does not parse", self._no_message),
            ("gzip", GRPC + "message compression", self._compressed),
            ("health", GRPC + "health checking protocol", self._health),
            ("statistics", TRITON + "statistics", self._statistics),
            ("repository_index", TRITON + "model repository", self._index),
        ]

    def _live(self) -> None:
        expect(self._target.call("ServerLive", pb.ServerLiveRequest()).live, "live: true", "false")

    def _ready(self) -> None:
        expect(self._target.call("ServerReady", pb.ServerReadyRequest()).ready, "ready: true", "false")

    def _metadata(self) -> None:
        found = self._target.call("ServerMetadata", pb.ServerMetadataRequest())
        expect(found.name and found.version, "a name and a version", f"{found.name!r} and {found.version!r}")

    def _unknown_model_ready(self) -> None:
        try:
            found = self._target.call("ModelReady", pb.ModelReadyRequest(name=UNKNOWN))
        except grpc.RpcError as error:
            expect(error.code() in UNKNOWN_MODEL, "ready: false or NOT_FOUND", error.code().name)
        else:
            expect(not found.ready, "ready: false or NOT_FOUND", "ready: true")

    def _unknown_fields(self) -> None:
        # Field 1000, a text of one character, which no message of the protocol has.
        expect(self._target.call("ServerLive", b"\xc2\x3e\x01x").live, "live: true", "false")

    def _unknown_method(self) -> None:
        self._target.refuse("NoSuchMethod", pb.ServerLiveRequest(), (grpc.StatusCode.UNIMPLEMENTED,))

    def _no_message(self) -> None:
        codes = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        self._target.refuse("ModelInfer", b"\xff\xff\xff", codes)
        self._live()

    def _compressed(self) -> None:
        answer = self._target.offered("ServerLive", pb.ServerLiveRequest(), compression=grpc.Compression.Gzip)
        expect(answer.live, "live: true", "false")

    def _health(self) -> None:
        found = self._target.offered(
            HEALTH, b"", answer=pb.ServerLiveResponse
        )  # a field 1 of varints, as in HealthCheckResponse
        expect(found.live, "status SERVING (1)", "another one")

    def _statistics(self) -> None:
        self._target.offered("ModelStatistics", pb.ModelStatisticsRequest())

    def _index(self) -> None:
        self._target.offered("RepositoryIndex", pb.RepositoryIndexRequest())


class _ModelChecks:
    def __init__(self, target: GrpcTarget, model: TargetModel) -> None:
        self._target, self._model = target, model

    def of_each_model(self) -> list[Row]:
        """Checks that depend on the model's data types."""
        return [
            ("model_ready", OIP + "Model Ready", self._ready),
            ("model_metadata", OIP + "Model Metadata", self._metadata),
            ("infer.raw", f"{OIP}raw_input_contents ({self._model.datatypes})", self._raw),
            ("infer.typed", f"{OIP}InferTensorContents ({self._model.datatypes})", self._typed),
            ("model_config", TRITON + "model configuration", self._config),
        ]

    def of_one_model(self) -> list[Row]:
        """Checks that one model is enough for."""
        return [
            ("infer.id", OIP + "ModelInferRequest.id", self._id),
            ("infer.outputs", OIP + "ModelInferRequest.outputs", self._outputs),
            ("infer.parameters", OIP + "Parameters", self._parameters),
            ("infer.unknown_fields", "Protocol Buffers: unknown fields are kept or ignored", self._unknown_fields),
            ("infer.stream", TRITON + "ModelStreamInfer", self._stream),
            *(
                (f"infer.refused.{name}", OIP + "Inference, status of an error", self._refusal(change))
                for name, change in REFUSED.items()
            ),
        ]

    def _infer(self, request: Any) -> Any:
        return self._target.call("ModelInfer", request)

    def _ready(self) -> None:
        found = self._target.call("ModelReady", pb.ModelReadyRequest(name=self._model.name))
        expect(found.ready, "ready: true", "false")

    def _metadata(self) -> None:
        found = self._target.call("ModelMetadata", pb.ModelMetadataRequest(name=self._model.name))
        expect(found.name == self._model.name, f"the name {self._model.name!r}", repr(found.name))
        for tensor in (*found.inputs, *found.outputs):
            expect(tensor.name and tensor.datatype in WIDTHS, "a name and a data type of the protocol", tensor)

    def _raw(self) -> None:
        found = self._infer(infer_request(self._model))
        expect(found.model_name == self._model.name, f"model_name {self._model.name!r}", repr(found.model_name))
        described = {tensor.name: tensor.datatype for tensor in self._model.outputs}
        for output in found.outputs:
            expect(
                described.get(output.name) == output.datatype, f"an output of {described}", f"{output.name} {output.datatype}"
            )
        for output, values in zip(found.outputs, output_values(found).values(), strict=True):
            count = 1
            for dimension in output.shape:
                count *= dimension
            expect(len(values) == count, f"{count} elements in {output.name} of shape {list(output.shape)}", len(values))

    def _typed(self) -> None:
        if not self._model.has_typed_contents:
            raise NotOfferedError("FP16 and BF16 have no typed contents")
        typed = output_values(self._infer(infer_request(self._model, is_raw=False)))
        raw = output_values(self._infer(infer_request(self._model)))
        for name, values in raw.items():
            expect(same_values(typed.get(name, []), values), f"the values of raw contents in {name}", typed.get(name))

    def _config(self) -> None:
        found = self._target.offered("ModelConfig", pb.ModelConfigRequest(name=self._model.name))
        expect(found.config.name == self._model.name, f"config.name {self._model.name!r}", repr(found.config.name))

    def _id(self) -> None:
        found = self._infer(infer_request(self._model, id="check-1"))
        expect(found.id == "check-1", "the request's id 'check-1'", repr(found.id))

    def _outputs(self) -> None:
        wanted = self._model.outputs[-1].name
        request = infer_request(self._model)
        request.outputs.add(name=wanted)
        found = [output.name for output in self._infer(request).outputs]
        expect(found == [wanted], f"the one output {wanted!r}", found)

    def _parameters(self) -> None:
        request = infer_request(self._model)
        request.parameters["conformance_check"].string_param = "x"
        request.inputs[0].parameters["conformance_check"].int64_param = 1
        expect(self._infer(request).outputs, "an answer, as parameters are optional", "none")

    def _unknown_fields(self) -> None:
        sent = infer_request(self._model).SerializeToString() + b"\xc2\x3e\x01x"
        expect(self._infer(sent).outputs, "an answer with outputs", "none")

    def _stream(self) -> None:
        call = self._target.channel.stream_stream(
            f"{SERVICE}ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        requests = [infer_request(self._model, id=str(number)) for number in range(2)]
        try:
            found = list(call(iter(requests), timeout=SECONDS))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise NotOfferedError("ModelStreamInfer is UNIMPLEMENTED") from None
            raise
        expect(all(not part.error_message for part in found), "no error", [part.error_message for part in found])
        ids = sorted(part.infer_response.id for part in found)
        expect(ids == ["0", "1"], "an answer to each of two requests", ids)

    def _refusal(self, change: Callable[[Any], None]) -> Callable[[], None]:
        def run() -> None:
            request = infer_request(self._model)
            change(request)
            self._target.refuse("ModelInfer", request, UNKNOWN_MODEL)
            expect(self._target.call("ServerLive", pb.ServerLiveRequest()).live, "a server that is live after it", "false")

        return run


def _no_inputs(request: Any) -> None:
    request.ClearField("inputs")
    request.ClearField("raw_input_contents")


def _contents_twice(request: Any) -> None:
    request.inputs[0].contents.int_contents.append(1)


def _wrong_datatype(request: Any) -> None:
    request.inputs[0].datatype = "FP64" if request.inputs[0].datatype != "FP64" else "INT8"


def _changed_shape(request: Any) -> None:
    request.inputs[0].shape[-1:] = [request.inputs[0].shape[-1] + 1 if request.inputs[0].shape else 2]


# Ways to break a request of a model, by name.
REFUSED: dict[str, Callable[[Any], None]] = {
    "unknown_version": lambda request: setattr(request, "model_version", "999999"),
    "no_inputs": _no_inputs,
    "no_contents": lambda request: request.ClearField("raw_input_contents"),
    "raw_and_typed": _contents_twice,
    "unknown_input": lambda request: setattr(request.inputs[0], "name", UNKNOWN),
    "unknown_output": lambda request: request.outputs.add(name=UNKNOWN),
    "wrong_datatype": _wrong_datatype,
    "shape_beyond_contents": _changed_shape,
    "negative_shape": lambda request: request.inputs[0].shape.__setitem__(slice(None), [-1] * len(request.inputs[0].shape)),
    "raw_too_short": lambda request: request.raw_input_contents.__setitem__(0, request.raw_input_contents[0][:-1]),
}
