"""One server under test, with the requests for it and the processes that send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from serve.benchmark.errors import BenchmarkArgumentError
from serve.benchmark.load.load_generator import LoadGenerator
from serve.benchmark.load.order import Target, TlsFiles
from serve.benchmark.measurement import Bench
from serve.benchmark.request_inputs import RequestPlan
from serve.benchmark.server_statistics import ServerTotals
from serve.benchmark.shared_memory import shared_requests
from serve.client import InferenceClient, InferenceClientError
from serve.client.commands.display import provider_of
from serve.client.commands.input_arguments import fitted_inputs
from serve.client.connection.channel import method_path
from serve.client.connection.headers import bearer
from serve.client.connection.tls import Tls
from serve.client.values.parameters import Parameter

if TYPE_CHECKING:
    from types import TracebackType

    from protos.inference_pb2 import ModelInferRequest, ModelInferResponse


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What requests look like and how they travel.

    Attributes:
        batch_size: rows per request.
        shapes: sizes for inputs that have variable ones, by name, without the batch dimension; requests have them in turn.
        given: arrays or what JSON made of a literal, by input.
        zeros: other inputs are zeros instead of random.
        parameters: of every request.
        version: of the model; empty for the server's choice.
        streaming: over ModelStreamInfer instead of ModelInfer.
        shared_memory: tensors travel in system shared memory.
        processes: that send them.
        timeout_s: of the calls that prepare the load.
        tls: for an encrypted connection; None for a plain one.
        token: of every call; only over TLS, or to this machine.
        metadata: of every call.
    """

    batch_size: int = 1
    shapes: Sequence[Mapping[str, Sequence[int]]] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    zeros: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    version: str = ""
    streaming: bool = False
    shared_memory: bool = False
    processes: int = 1
    timeout_s: float = 30.0
    tls: Tls | None = None
    token: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Contestant:
    """A server, ready to be loaded: it has answered one request for each model.

    Args:
        address: HOST:PORT of its gRPC port.
        models: the requests are for these, in turn.
        options: what the requests look like.

    Attributes:
        models: their names.
        versions: the versions that answered, by model.
        provider: what the server computes the first model with; None if it does not say.
        requests: every distinct request with its model's number, as the models take turns.
        plain_requests: the same of the first model with their tensors inside.
        notes: what was changed about the given inputs, a line each.

    Raises:
        BenchmarkArgumentError: the options do not fit a model.
        InferenceClientError: the server does not answer, has no such model or refuses the request, in its own words.
    """

    def __init__(self, address: str, models: Sequence[str], options: RequestOptions) -> None:
        self.models = tuple(models)
        self.versions: dict[str, str] = {}
        self.provider: str | None = None
        self.notes: list[str] = []
        self.plain_requests: list[ModelInferRequest] = []
        self._names: set[str] = set()  # of the models, those that the server has for them too
        self._options = options
        self._stack = ExitStack()
        try:
            host, port = host_and_port(address)
            self.client = self._stack.enter_context(
                InferenceClient(
                    address, timeout_s=options.timeout_s, tls=options.tls, token=options.token, metadata=options.metadata
                )
            )
            self.requests = self._all_requests()
            self.generator = self._stack.enter_context(self._generator(host, port))
        except BaseException:
            self._stack.close()
            raise

    @property
    def bench(self) -> Bench:
        """What a measurement needs."""
        return Bench(
            generator=self.generator,
            read_totals=self.totals,
            batch_size=self._options.batch_size,
            models=self.models,
        )

    def totals(self) -> ServerTotals | None:
        """The server's counters for these models; None from a server that keeps none."""
        try:
            found = [one for model in self.models for one in self.client.statistics(model, self._options.version)]
        except InferenceClientError as error:
            if error.code == "UNIMPLEMENTED":
                return None
            raise
        # Some servers tell of all models, whichever they are asked for.
        counted = {(one.name, one.version): one for one in found if one.name in self._names}
        return ServerTotals.of(counted.values())

    def close(self) -> None:
        """End the processes and hang up."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _all_requests(self) -> list[tuple[int, ModelInferRequest]]:
        """(number of the model, request), the models in turn."""
        self._check_given()
        found = [self._model_requests(model) for model in self.models]
        longest = max(len(requests) for requests in found)
        return [(n, requests[i % len(requests)]) for i in range(longest) for n, requests in enumerate(found)]

    def _check_given(self) -> None:
        inputs = {
            tensor.name for model in self.models for tensor in self.client.model_metadata(model, self._options.version).inputs
        }
        for wrong in {*self._options.given, *(name for shapes in self._options.shapes for name in shapes)} - inputs:
            names = " or ".join(map(repr, self.models))
            raise BenchmarkArgumentError(f"model {names} has no input {wrong!r}; expected one of {', '.join(sorted(inputs))}")

    def _model_requests(self, model: str) -> list[ModelInferRequest]:
        options = self._options
        metadata = self.client.model_metadata(model, options.version)
        self._names |= {model, metadata.name}
        metadata.name = model  # that requests go to, whatever the server calls it
        config = self.client.model_config(model, options.version)
        names = {tensor.name for tensor in metadata.inputs}
        fitted, notes = fitted_inputs({k: v for k, v in options.given.items() if k in names}, metadata)
        self.notes += notes
        plan = RequestPlan(
            metadata=metadata,
            max_batch_size=config.max_batch_size,
            batch_size=options.batch_size,
            shapes={},
            given=fitted,
            version=options.version,
            zeros=options.zeros,
            parameters=options.parameters,
        )
        self.provider = self.provider or provider_of(config)
        variants = [{k: v for k, v in shapes.items() if k in names} for shapes in options.shapes or [{}]]
        found = [self._tried(model, replace(plan, shapes=shapes)) for shapes in variants]
        return [requests[i % len(requests)] for i in range(max(map(len, found))) for requests in found]

    def _tried(self, model: str, plan: RequestPlan) -> list[ModelInferRequest]:
        """The requests as they are to be sent; what the server has against one is said before any load, in its own words."""
        requests = plan.requests()
        self.plain_requests = self.plain_requests or requests
        answer = self.client.infer_message(requests[0])
        self.versions[model] = answer.model_version
        if not self._options.shared_memory:
            return requests
        # The same request has the same answer, but others may have longer ones.
        sizes = slice(1 if plan.max_batch_size else 0, None)  # without the batch, which is as large in all of them
        varies = any(output.datatype == "BYTES" or -1 in output.shape[sizes] for output in plan.metadata.outputs)
        others = [self.client.infer_message(request) if varies else answer for request in requests[1:]]
        return self._shared(requests, [answer, *others])

    def _shared(self, requests: list[ModelInferRequest], answers: list[ModelInferResponse]) -> list[ModelInferRequest]:
        shared = shared_requests(self.client, requests, answers, self._stack)
        self.client.infer_message(shared[0])
        return shared

    def _generator(self, host: str, port: int) -> LoadGenerator:
        method = "ModelStreamInfer" if self._options.streaming else "ModelInfer"
        token = self._options.token
        target = Target(
            host=host,
            port=port,
            path=method_path(method),
            streaming=self._options.streaming,
            tls=None if self._options.tls is None else _files(self._options.tls),
            headers=tuple((name.lower(), value) for name, value in self._options.metadata.items())
            + (() if token is None else bearer(token)),
        )
        messages = [request.SerializeToString() for _, request in self.requests]
        numbers = [number for number, _ in self.requests]
        return LoadGenerator(target, messages, models=numbers, processes=self._options.processes)


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of an address.

    Raises:
        BenchmarkArgumentError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not (port.isdecimal() and port.isascii()) or not 0 < int(port) < 2**16:
        raise BenchmarkArgumentError(f"the address must be HOST:PORT, such as 127.0.0.1:8001, not {address!r}")
    return host.strip("[]"), int(port)


def _files(tls: Tls) -> TlsFiles:
    def text(path: Path | str | None) -> str | None:
        return None if path is None else str(path)

    return TlsFiles(
        authorities=text(tls.authorities),
        certificate=text(tls.certificate),
        key=text(tls.key),
        server_name=tls.server_name,
    )
