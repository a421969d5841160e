"""Time of a request by part of the server: without sockets, with an HTTP/2 client in the same process.

python -m benchmarks.request_cost mlp.onnx --in-flight 16

The total is measured first, without a profiler. The shares are cProfile's, which makes every Python call more expensive: parts
with many small calls look somewhat larger than they are. It does not see compiled calls, so measure shares with the sources:
HALFSERVE_COMPILED=0 python -m benchmarks.request_cost mlp.onnx

With --capture-share 1 and few rounds, all requests are captured: the difference is what one captured request costs the event
loop. With 0.01 it is what the others pay.

With --cold the processor's caches are emptied before each round, as other programs do it while a server sleeps between the
requests of one client: python -m benchmarks.request_cost mlp.onnx --in-flight 1 --cold --rounds 300

python -m benchmarks.request_cost --ensemble

loads two tiny models, and an ensemble of the two, in turn: the cost that the second step adds to a request.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
import typer
from ngh2 import Connection, Role, StreamClosed
from onnx import TensorProto, helper

from halfserve.compiled_build import SWITCH, build_in_use
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.caching.caching_scheduler import cache_answers
from halfserve.serve.engine.caching.response_cache import DEFAULT_MIB, ResponseCache
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import ModelRepository, find_models
from halfserve.serve.model_control.control_options import ControlOptions
from halfserve.serve.model_control.model_control import ModelControl
from halfserve.serve.model_control.version_loading import VersionLoader
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.process import infrequent_collection
from halfserve.serve.protocol.service import INFER_PATH, Service
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.nghttp2.connection import GrpcConnection
from halfserve.serve.transports.nghttp2.server import Nghttp2Server

SERVE = f"{Path(__file__).parent.parent / 'halfserve' / 'serve'}/"
HEADERS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", INFER_PATH.encode()),
    (b":authority", b"127.0.0.1"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]
EVICTING_BYTES = 2**26  # more than the caches of a core hold
WINDOW_BYTES = 2**22  # as large as that of gRPC's own clients
# Room by path below serve/; the first match counts.
ROOMS = {
    "transports/": "HTTP/2 and gRPC framing (libnghttp2 included)",
    "protocol/": "request and response messages",
    "engine/execution/batch.py": "rows in and out of the batch",
    "engine/tensors.py": "rows in and out of the batch",
    "engine/requests.py": "rows in and out of the batch",
    "engine/model_statistics.py": "statistics",
    "engine/queueing/pace.py": "statistics",
    "engine/": "queue and batcher",
    "backends/": "the model (ONNX Runtime and its call)",
}
LOOP = "the event loop"
STEPS = ("first", "second")


class Wire:
    """A transport that collects the written bytes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Collect the data."""
        self.written.append(data)

    def close(self) -> None:
        """Do nothing, as there is no connection."""

    def get_extra_info(self, name: str) -> Any:
        """Return None, as there is no peer."""
        del name


class Client:
    """Sends requests to a connection of the server and waits for all answers."""

    def __init__(self, connection: GrpcConnection, request: bytes, *, cold: bool = False) -> None:
        """`cold`: empty the processor's caches before each round."""
        self._evicting = np.zeros(EVICTING_BYTES if cold else 0, np.uint8)
        self._connection = connection
        self._request = request
        self._wire = Wire()
        self._http2 = Connection(Role.CLIENT)
        self._http2.initiate_connection()
        self._http2.set_local_window_size(WINDOW_BYTES)
        connection.connection_made(cast("asyncio.Transport", self._wire))
        connection.data_received(self._http2.data_to_send())
        self._read()

    async def round(self, in_flight: int, profile: cProfile.Profile | None = None) -> float:
        """Seconds of the server from the bytes of `in_flight` requests to the bytes of their answers."""
        for _ in range(in_flight):
            stream = self._http2.send_request(HEADERS)
            self._http2.send_data(stream, self._request, end_stream=True)
        self._evicting += 1
        answered, spent = 0, 0.0
        while answered < in_flight:
            arrived = self._http2.data_to_send()
            if profile is not None:
                profile.enable()
            began = time.perf_counter()
            if arrived:
                self._connection.data_received(arrived)
            await asyncio.sleep(0)
            spent += time.perf_counter() - began
            if profile is not None:
                profile.disable()
            answered += self._read()
        return spent

    def _read(self) -> int:
        for data in self._wire.written:
            self._http2.receive_data(data)
        self._wire.written.clear()
        return sum(isinstance(event, StreamClosed) for event in self._http2.events())


def loaded(path: Path) -> Model:
    """Return the model, on the CPU."""
    (files,) = find_models(path)
    return load_model(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())


def one_row(model: Model) -> bytes:
    """Return a framed request of ones."""
    request = pb.ModelInferRequest(model_name=model.name)
    for spec in model.interface.inputs:
        shape = [1, *(16 if size < 0 else size for size in spec.shape[1:])]
        request.inputs.add(name=spec.name, datatype=spec.datatype.wire, shape=shape)
        request.raw_input_contents.append(np.ones(shape, spec.datatype.array_dtype).tobytes())
    return frame(request.SerializeToString())


def shares(profile: cProfile.Profile) -> Counter[str]:
    """Profiled seconds by room; time in other code counts for its caller."""
    seconds: Counter[str] = Counter()
    stats = cast("dict[Any, Any]", pstats.Stats(profile).stats)  # type: ignore[attr-defined]  # (not in typeshed)
    for (path, _, name), (_, _, own, _, callers) in stats.items():
        room = _room(path)
        if room is not None:
            seconds[room] += own
            continue
        for (caller, _, _), (_, _, in_caller, _) in callers.items():
            seconds[_room(caller) or LOOP] += in_caller
        if not callers and "disable" not in name:
            seconds[LOOP] += own
    return seconds


def _room(path: str) -> str | None:
    if "onnxruntime" in path and "serve" not in path:
        return ROOMS["backends/"]
    below = path.removeprefix(SERVE)
    return next((room for start, room in ROOMS.items() if below != path and below.startswith(start)), None)


def write_ensemble(repository: Path) -> None:
    """Write two models that add a number to 64 values, and their ensemble, which is called `pipeline`."""
    for name in STEPS:
        tensor = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in "xy"]
        one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
        graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], name, tensor[:1], tensor[1:], [one])
        (repository / name / "1").mkdir(parents=True)
        saved = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        (repository / name / "1" / "model.onnx").write_bytes(saved.SerializeToString())
    tensor_maps = (("x", "between"), ("between", "y"))
    steps = "".join(
        f'step {{ model_name: "{name}" input_map {{ key: "x" value: "{given}" }} output_map {{ key: "y" value: "{made}" }} }} '
        for name, (given, made) in zip(STEPS, tensor_maps, strict=True)
    )
    (repository / "pipeline").mkdir()
    (repository / "pipeline" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 32 input { name: "x" data_type: TYPE_FP32 dims: 64 } '
        f'output {{ name: "y" data_type: TYPE_FP32 dims: 64 }} ensemble_scheduling {{ {steps} }}'
    )


async def _measure_ensemble(in_flight: int, rounds: int) -> dict[str, float]:
    """Microseconds per request, by model."""
    core = InferenceCore([])
    loader = VersionLoader(
        runtime=OnnxRuntime(),
        placement=DevicePlacement(use_gpu=False, threads=1),
        defaults=Defaults(),
        warm_up_budget_s=5.0,
    )
    with TemporaryDirectory() as folder:
        write_ensemble(Path(folder))
        control = ModelControl(core, ModelRepository(Path(folder)), loader, ControlOptions())
        await control.start()
        control.close()
    server = Nghttp2Server(Service(core, server_version="0"), "127.0.0.1", 0)
    clients = {model.name: Client(server.connection(), one_row(model)) for model in core.models()}
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(rounds + rounds // 4):
        for name, client in clients.items():
            spent = await client.round(in_flight)
            if number >= rounds // 4:
                seconds[name].append(spent)
    return {name: statistics.median(spent) / in_flight * 1e6 for name, spent in seconds.items()}


async def _seconds(client: Client, in_flight: int, rounds: int) -> float:
    for _ in range(rounds // 4):
        await client.round(in_flight)
    return statistics.median([await client.round(in_flight) for _ in range(rounds)]) / in_flight


def _client(model: Model, *, cold: bool = False) -> Client:
    server = Nghttp2Server(Service(InferenceCore([model]), server_version="0"), "127.0.0.1", 0)
    return Client(server.connection(), one_row(model), cold=cold)


async def _measure_hits(path: Path, in_flight: int, rounds: int, *, cold: bool) -> float:
    """Seconds of a request that the response cache answers."""
    model = loaded(path)
    model.config.response_cache.enable = True
    cache_answers(model, ResponseCache(DEFAULT_MIB * 2**20))
    return await _seconds(_client(model, cold=cold), in_flight, rounds)


async def _measure_capture(path: Path, in_flight: int, rounds: int, share: float) -> tuple[float, float]:
    """Seconds of a request, without capture and with it: medians of rounds in turn."""
    with TemporaryDirectory() as folder:
        options = ObserveOptions(), ObserveOptions(capture=Path(folder), capture_share=share)
        services = [Service(InferenceCore([loaded(path)]), server_version="0", observe=chosen) for chosen in options]
        servers = [Nghttp2Server(service, "127.0.0.1", 0) for service in services]
        clients = [
            Client(server.connection(), one_row(service.core.models()[0]))
            for server, service in zip(servers, services, strict=True)
        ]
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + rounds // 4):
            for client, of_client in zip(clients, seconds, strict=True):
                spent = await client.round(in_flight)
                if number >= rounds // 4:
                    of_client.append(spent)
        for service in services:
            service.observability.close()
    without, captured = (statistics.median(spent) / in_flight for spent in seconds)
    return without, captured


async def _measure(path: Path, in_flight: int, rounds: int, *, cold: bool) -> tuple[float, Counter[str]]:
    client = _client(loaded(path), cold=cold)
    seconds = await _seconds(client, in_flight, rounds)
    profile = cProfile.Profile()
    for _ in range(rounds):
        await client.round(in_flight, profile)
    return seconds, shares(profile)


def main(
    model: Annotated[Path | None, typer.Argument(help="An ONNX file; not with --ensemble.")] = None,
    *,
    ensemble: Annotated[bool, typer.Option("--ensemble", help="An ensemble of two tiny models against these alone.")] = False,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests that arrive together.")] = 16,
    rounds: Annotated[int, typer.Option(min=4)] = 3000,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the processor's caches before each round.")] = False,
    capture_share: Annotated[float, typer.Option(min=0, max=1, help="Also measure a server that captures this share.")] = 0,
) -> None:
    """Print the microseconds of a request, and of each part of the server."""
    import uvloop  # noqa: PLC0415  (has no wheel for Windows)

    if ensemble is (model is not None):
        raise typer.BadParameter("give an ONNX file or --ensemble, one of the two")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, infrequent_collection():  # as in a server
        if model is None:
            costs = runner.run(_measure_ensemble(in_flight, rounds))
            for name, cost in costs.items():
                print(f"{cost:6.1f} us a request  {name}")
            print(f"{costs['pipeline'] - max(costs[name] for name in STEPS):6.1f} us for the second step, its model included")
            return
        seconds, by_room = runner.run(_measure(model, in_flight, rounds, cold=cold))
        hit = runner.run(_measure_hits(model, in_flight, rounds, cold=cold))
        pair = runner.run(_measure_capture(model, in_flight, rounds, capture_share)) if capture_share else None
    build, caches = build_in_use().name, ", cold caches" * cold
    print(f"{seconds * 1e6:.1f} us a request, {in_flight} at a time (median of {rounds} rounds, {build} build{caches})")
    print(f"{hit * 1e6:.1f} us a request that the response cache answers")
    if pair is not None:
        without, captured = pair
        print(
            f"{captured * 1e6:.1f} us where {capture_share:g} are captured, {without * 1e6:.1f} us without (medians, in turn)"
        )
    if build == "compiled":
        print(f"The parts of the sources, as the profiler does not see compiled calls: set {SWITCH}=0.")
        return
    for room, part in by_room.most_common():
        share = part / by_room.total()
        print(f"{share * seconds * 1e6:6.1f} us  {share:4.0%}  {room}")


if __name__ == "__main__":
    typer.run(main)
