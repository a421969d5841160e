"""A server under test, with the requests and the processes that load it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.captured_requests import CapturedTraffic
from halfserve.protos.cluster_pb2 import Directory, Member
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.captured_load import captured_messages
from halfserve.serve.benchmark.free_sizes import FreeSizes, shape_options
from halfserve.serve.benchmark.level import ServerTotals
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LoadEndpoint, TlsPaths
from halfserve.serve.benchmark.measurement import Bench
from halfserve.serve.benchmark.request_inputs import RequestPlan
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.channel_settings import CLUSTER, Tls, bearer, headers_of, method_path
from halfserve.serve.client.cli.display import provider_of
from halfserve.serve.client.cli.inputs import fitted_inputs
from halfserve.serve.client.client import Client
from halfserve.serve.client.cluster.channel import watch_cluster
from halfserve.serve.client.errors import ClientError
from halfserve.serve.client.infer_messages import Parameter, SharedSlice
from halfserve.serve.engine.cuda_driver import CudaError, cuda_driver

# What servers answer to a size that the model cannot compute, such as more tokens than it has positions for.
SIZE_REFUSALS = ("INVALID_ARGUMENT", "INTERNAL", "UNKNOWN")
ALIGNMENT = 64  # alignment of each tensor in bytes; the width of a vector register
SharedMemory: TypeAlias = Literal["system", "cuda"]


class _Places:
    """Allocates parts of a region; `end` is the number of allocated bytes."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size: int) -> int:
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = offset + size
        return offset


def shared_requests(
    client: Client,
    requests: Sequence[pb.ModelInferRequest],
    answers: Sequence[pb.ModelInferResponse],
    kind: SharedMemory,
    stack: ExitStack,
) -> list[pb.ModelInferRequest]:
    """Return requests whose inputs and outputs are in shared memory, which is open until `stack` is closed.

    Each distinct request has its own places for inputs and outputs. Requests in flight at the same time may share a place for
    outputs, because the answers are not read. `answers` has the answer to each request; it determines the outputs and their
    sizes.

    Raises:
        ClientError: the server does not support shared memory, is not on this machine, or there is too little of it.
        BenchmarkError: this process has no CUDA device, or too little memory on it.
    """
    places = _Places()
    plans = [[places.take(len(content)) for content in request.raw_input_contents] for request in requests]
    results = [[places.take(len(content)) for content in answer.raw_output_contents] for answer in answers]
    contents = np.zeros(max(places.end, 1), np.uint8)
    for request, offsets in zip(requests, plans, strict=True):
        for offset, content in zip(offsets, request.raw_input_contents, strict=True):
            contents[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
    region = stack.enter_context((_in_system_memory if kind == "system" else _in_cuda_memory)(client, contents))
    return [_rewritten(*four) for four in zip(requests, answers, repeat(region), plans, results)]


@contextmanager
def _in_system_memory(client: Client, contents: Array) -> Iterator[str]:
    """Name of a registered region with these bytes."""
    with client.shared_region(contents.nbytes) as region:
        region.array(contents.shape, np.uint8)[:] = contents
        yield region.name


@contextmanager
def _in_cuda_memory(client: Client, contents: Array) -> Iterator[str]:
    driver = cuda_driver()
    if driver is None or not driver.device_count:
        raise BenchmarkError("this machine has no CUDA device to share memory of; use --shared-memory system")
    try:
        memory, handle = driver.allocate_shared(contents.nbytes, 0)
        memory.write(0, contents.tobytes())
    except CudaError as error:
        raise BenchmarkError(f"no {contents.nbytes} bytes on the CUDA device could be shared: {error}") from error
    name = f"halfserve-{os.getpid()}-{secrets.token_hex(8)}"
    client.register_cuda_region(name, handle, contents.nbytes)
    try:
        yield name
    finally:
        with suppress(ClientError):  # the server may be gone
            client.unregister_cuda_region(name)
        del memory  # only after it is unregistered


def _rewritten(
    request: pb.ModelInferRequest, answer: pb.ModelInferResponse, region: str, offsets: Sequence[int], outputs: Sequence[int]
) -> pb.ModelInferRequest:
    changed = pb.ModelInferRequest()
    changed.CopyFrom(request)
    del changed.raw_input_contents[:]
    for tensor, content, offset in zip(changed.inputs, request.raw_input_contents, offsets, strict=True):
        SharedSlice(region=region, offset=offset, byte_size=len(content)).write_to(tensor.parameters)
    for output, content, offset in zip(answer.outputs, answer.raw_output_contents, outputs, strict=True):
        place = SharedSlice(region=region, offset=offset, byte_size=len(content))
        place.write_to(changed.outputs.add(name=output.name).parameters)
    return changed


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    batch_size: int = 1  # rows per request
    # Shapes of inputs with variable sizes, by name, without the batch dimension; requests use them in turn.
    shapes: Sequence[Mapping[str, Sequence[int]]] = ()
    # Shapes to try first for inputs of any size that `shapes` leaves out: those of another target, to compare like with like.
    usual_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)  # input name -> array or parsed JSON
    zeros: bool = False  # whether other inputs are zeros instead of random
    captured: CapturedTraffic | None = None  # requests to send in place of all these, for the only model
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # parameters of every request
    version: str = ""  # version of the model; empty for the server's choice
    streaming: bool = False  # whether to use ModelStreamInfer instead of ModelInfer
    shared_memory: SharedMemory | None = None  # kind of memory that holds the tensors; None sends them
    processes: int = 1  # number of load processes
    timeout_s: float = 30.0  # time limit of the calls that prepare the load, in seconds
    tls: Tls | None = None  # certificates for an encrypted connection; None for no encryption
    token: str | None = None  # bearer token of every call; only over TLS, or to this machine
    metadata: Mapping[str, str] = field(default_factory=dict)  # gRPC metadata of every call

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of every call, with lower-case names; its token among them."""
        named = tuple((name.lower(), value) for name, value in self.metadata.items())
        return named if self.token is None else named + bearer(self.token)


class LoadTarget:
    """A server or cluster that is ready to be loaded: it has answered one request for each model.

    Of a cluster (cluster://HOST:PORT,...) all members that serve the models are loaded. Requests go to the models in turn.

    Raises:
        BenchmarkArgumentError: the options do not fit a model.
        ClientError: the server does not answer, has no such model or refuses the request.
    """

    def __init__(self, address: str, models: Sequence[str], options: RequestSettings) -> None:
        self.models = tuple(models)  # names of the models
        self.versions: dict[str, str] = {}  # version that answered, by model
        self.provider: str | None = None  # execution provider of the first model; None if the server does not say
        self.notes: list[str] = []  # one line for each change made to the given inputs
        self.chosen_shapes: dict[str, Sequence[int]] = {}  # shapes by input that no option gave
        self.plain_requests: Sequence[ModelInferRequest] = []  # requests to the first model with their tensors in the message
        self.rows: float = options.batch_size  # mean number of rows per request
        self._names: set[str] = set()  # names of the models, in requests and in the server's own metadata
        self._options = options
        self._stack = ExitStack()
        if address.startswith(CLUSTER) and options.shared_memory:
            raise BenchmarkArgumentError("the members of a cluster share no memory; expected the address of one, HOST:PORT")
        try:
            places = [] if address.startswith(CLUSTER) else [host_and_port(address)]
            self.client = self._stack.enter_context(
                Client(address, timeout_s=options.timeout_s, tls=options.tls, token=options.token, metadata=options.metadata)
            )
            self.requests = self._all_requests()  # (index of the model, request) for every distinct request, the models in turn
            self.generator = self._stack.enter_context(self._generator(places or self._members(address)))
        except BaseException:
            self._stack.close()
            raise

    @property
    def bench(self) -> Bench:
        return Bench(generator=self.generator, read_totals=self.totals, batch_size=self.rows, models=self.models)

    def totals(self) -> ServerTotals | None:
        """Return the server's counters for these models; None if the server keeps none."""
        try:
            found = [one for model in self.models for one in self.client.statistics(model, self._options.version)]
        except ClientError as error:
            if error.code == "UNIMPLEMENTED":
                return None
            raise
        # Some servers return the statistics of all models for every request.
        counted = {(one.name, one.version): one for one in found if one.name in self._names}
        return ServerTotals.of(counted.values())

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_requests(self) -> list[tuple[int, ModelInferRequest]]:
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

    def _model_requests(self, model: str) -> Sequence[ModelInferRequest]:
        options = self._options
        metadata = self.client.model_metadata(model, options.version)
        self._names |= {model, metadata.name}
        metadata.name = model  # requests carry the requested name, not the server's
        config = self.client.model_config(model, options.version)
        names = {tensor.name for tensor in metadata.inputs}
        self.provider = self.provider or provider_of(config)
        if options.captured is not None:
            optional = {tensor.name for tensor in config.input if tensor.optional}
            messages, self.rows, sampled = captured_messages(
                options.captured, metadata, names - optional, version=options.version, parameters=options.parameters
            )
            self.notes.append(sampled.text)
            return self._tried(model, messages, varies=True)
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
        variants = [{k: v for k, v in shapes.items() if k in names} for shapes in options.shapes or [{}]]
        # Answers to other requests may be longer than the first; the batch size is the same in all.
        sizes = slice(1 if plan.max_batch_size else 0, None)
        varies = any(output.datatype == "BYTES" or -1 in output.shape[sizes] for output in metadata.outputs)
        found = [self._sized(model, replace(plan, shapes=shapes), config, varies=varies) for shapes in variants]
        return [requests[i % len(requests)] for i in range(max(map(len, found))) for requests in found]

    def _sized(self, model: str, plan: RequestPlan, config: ModelConfig, *, varies: bool) -> Sequence[ModelInferRequest]:
        """Return the plan's requests, with sizes that the model answers for inputs of any size without one."""
        free, reason = FreeSizes(plan), ""
        if not free.shapes:
            return self._tried(model, plan.requests(), varies=varies)
        for shapes, origin in free.choices(config, self._options.usual_shapes):
            try:
                requests = self._tried(model, replace(plan, shapes={**plan.shapes, **shapes}).requests(), varies=varies)
            except ClientError as error:
                if error.code not in SIZE_REFUSALS:
                    raise
                reason = str(error)
            else:
                self.notes.append(f"{origin}: {shape_options(shapes)} (the option sets others)")
                self.chosen_shapes |= shapes
                return requests
        raise BenchmarkArgumentError(free.refused(reason))

    def _tried(self, model: str, requests: Sequence[ModelInferRequest], *, varies: bool) -> Sequence[ModelInferRequest]:
        """Return the requests, after one was sent, so that the server's error is raised before any load.

        `varies` says whether their answers may differ in size.
        """
        answer = self.client.infer_message(requests[0])
        self.plain_requests = self.plain_requests or requests
        self.versions[model] = answer.model_version
        kind = self._options.shared_memory
        if kind is None:
            return requests
        others = [self.client.infer_message(request) if varies else answer for request in requests[1:]]
        shared = shared_requests(self.client, requests, [answer, *others], kind, self._stack)
        self.client.infer_message(shared[0])
        return shared

    def _members(self, address: str) -> list[tuple[str, int]]:
        """Host and port of each member of a cluster that serves the models."""
        found: list[Directory] = []
        options = self._options
        watch = watch_cluster(address, found.append, tls=options.tls, token=options.token, headers=headers_of(options.metadata))
        try:
            watch.settled.result()
            watch.check()
        finally:
            watch.stop()
            watch.join()
        serving = [one for one in found[-1].members if one.state == Member.SERVING]
        members = [one.grpc_address for one in serving if set(self.models) <= set(one.models)]
        if not members:
            names = " and ".join(map(repr, self.models))
            raise BenchmarkArgumentError(f"no member of the cluster serves {names} together; measure one model at a time")
        counts = f"{len(members)} of {len(serving)} members"
        self.notes.append(f"the load goes to {counts}: {', '.join(members)}")
        return [host_and_port(member) for member in members]

    def _generator(self, places: Sequence[tuple[str, int]]) -> LoadGenerator:
        (host, port), *others = places
        method = "ModelStreamInfer" if self._options.streaming else "ModelInfer"
        target = LoadEndpoint(
            host=host,
            port=port,
            path=method_path(method),
            streaming=self._options.streaming,
            tls=None if self._options.tls is None else tls_paths(self._options.tls),
            headers=self._options.headers,
            others=tuple(others),
        )
        messages = [request.SerializeToString() for _, request in self.requests]
        numbers = [number for number, _ in self.requests]
        return LoadGenerator(target, messages, models=numbers, processes=self._options.processes)


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of HOST:PORT. Raises BenchmarkArgumentError: it is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not (port.isdecimal() and port.isascii()) or not 0 < int(port) < 2**16:
        raise BenchmarkArgumentError(f"the address must be HOST:PORT, such as 127.0.0.1:8001, not {address!r}")
    return host.strip("[]"), int(port)


def tls_paths(tls: Tls) -> TlsPaths:
    """Return the files of a client's TLS settings, for load processes, which import no gRPC."""

    def text(path: Path | str | None) -> str | None:
        return None if path is None else str(path)

    return TlsPaths(
        authorities=text(tls.authorities), certificate=text(tls.certificate), key=text(tls.key), server_name=tls.server_name
    )
