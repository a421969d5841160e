from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.observability.access_log import AccessLogger
from halfserve.serve.observability.inference_record import Caller, InferenceRecord
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from halfserve.serve.observability.outbox import Outbox
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, SECRET, Serving, index, row

INFER = "/inference.GRPCInferenceService/ModelInfer"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines; a fault of the server, which closes the file at its end, would show as one that is no JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def to_file(path: Path, mode: AccessLog, every: int = 100) -> ObserveOptions:
    return ObserveOptions(access_log=mode, access_log_file=path, access_log_every=every)


def test_a_request_is_one_line_without_its_contents(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with serving(to_file(log, AccessLog.ALL)) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("mlp", row(3), request_id='a "quoted" id', client_timeout=CLIENT_TIMEOUT_S)
    (line,) = lines_of(log)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert re.fullmatch(r"127\.0\.0\.1:\d+", line.pop("client"))
    queue, compute, total = (line.pop(f"{stage}_ms") for stage in ("queue", "compute", "total"))
    assert 0 <= queue <= total
    assert 0 < compute <= total
    assert queue + compute <= total + 0.002
    request_bytes, response_bytes = line.pop("request_bytes"), line.pop("response_bytes")
    assert 3 * 64 * 2 < request_bytes < 3 * 64 * 2 + 100
    assert 3 * 10 * 2 < response_bytes < 3 * 10 * 2 + 100
    assert line == {
        "level": "INFO",
        "id": 'a "quoted" id',
        "model": "mlp",
        "version": "3",
        "provider": "CPUExecutionProvider",
        "precision": "fp32 (the fp16 model, upcast)",
        "status": "OK",
        "rows": 3,
        "batch_rows": 3,
    }


def test_a_runtime_error_is_logged_without_tensor_values(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with serving(to_file(log, AccessLog.ERRORS)) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("mlp", row(), client_timeout=CLIENT_TIMEOUT_S)
        for model, inputs in (("mlp", row(width=5)), ("nobody", row()), ("picky", index(SECRET))):
            with pytest.raises(InferenceServerException):
                client.infer(model, inputs, request_id=f"for {model}", client_timeout=CLIENT_TIMEOUT_S)
    wrong, unknown, failed = lines_of(log)
    assert (wrong["status"], wrong["model"], wrong["id"]) == ("INVALID_ARGUMENT", "mlp", "for mlp")
    assert "[1, 5]" in wrong["error"]
    assert (unknown["status"], unknown["model"]) == ("NOT_FOUND", "nobody")
    assert (failed["status"], failed["model"], failed["version"]) == ("INTERNAL", "picky", "1")
    assert [line["level"] for line in (wrong, unknown, failed)] == ["WARNING", "WARNING", "ERROR"]
    assert failed["total_ms"] > 0
    assert str(SECRET) not in log.read_text()


def test_bytes_that_are_no_request_get_a_line_too(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with serving(to_file(log, AccessLog.ERRORS)) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(INFER)(b"\xff\xff", timeout=CLIENT_TIMEOUT_S, metadata=[("x-request-id", "from-proxy")])
        refused = server.call(lambda: dict(server.core.figures.refused))
    (line,) = lines_of(log)
    assert (line["status"], line["model"], line["id"]) == ("INVALID_ARGUMENT", "", "from-proxy")
    assert refused == {"invalid_argument": 1}


def test_a_line_names_the_caller_s_trace_where_nothing_is_traced(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-00"}
    with serving(to_file(log, AccessLog.ALL)) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("mlp", row(), headers=headers, client_timeout=CLIENT_TIMEOUT_S)
        with pytest.raises(InferenceServerException):
            client.infer("nobody", row(), headers=headers, client_timeout=CLIENT_TIMEOUT_S)
    assert [line["trace_id"] for line in lines_of(log)] == [trace, trace]


def test_of_answers_some_can_be_logged(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with serving(to_file(log, AccessLog.SAMPLED, every=3)) as server, triton.InferenceServerClient(server.address) as client:
        for number in range(7):
            client.infer("mlp", row(), request_id=str(number), client_timeout=CLIENT_TIMEOUT_S)
        with pytest.raises(InferenceServerException):
            client.infer("nobody", row(), client_timeout=CLIENT_TIMEOUT_S)
    assert [line["id"] for line in lines_of(log)] == ["2", "5", ""]


def test_requests_of_a_stream_have_lines_of_their_own(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(128)])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    messages = []
    for number in range(3):
        request.id = str(number)
        messages.append(request.SerializeToString())
    messages.append(pb.ModelInferRequest(model_name="nobody", id="wrong").SerializeToString())
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    with serving(to_file(log, AccessLog.ALL)) as server, grpc.insecure_channel(server.address) as channel:
        answers = list(channel.stream_stream(path)(iter(messages), timeout=CLIENT_TIMEOUT_S))
    assert len(answers) == 4
    assert sorted((line["id"], line["status"]) for line in lines_of(log)) == [
        ("0", "OK"),
        ("1", "OK"),
        ("2", "OK"),
        ("wrong", "NOT_FOUND"),
    ]


def test_no_line_is_written_while_the_log_is_off(serving: Serving) -> None:
    with serving(ObserveOptions()) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("mlp", row(), client_timeout=CLIENT_TIMEOUT_S)
        observer = server.service.observability.observer
        assert observer.log is None
        assert observer.tracer is None
        assert "halfserve_access_log_dropped_total" not in server.core.figures.readings


def test_a_log_that_cannot_be_written_costs_no_request(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with (
        serving(to_file(folder / "access.log", AccessLog.ALL)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        folder.rmdir()
        for _ in range(3):
            client.infer("mlp", row(), client_timeout=CLIENT_TIMEOUT_S)
        server.call(server.service.observability.close)
        assert server.call(server.core.figures.readings["halfserve_access_log_dropped_total"].read) == 3
    assert "access log: " in caplog.text
    assert "No such file or directory" in caplog.text


class Lines(list[str]):
    """An outbox that keeps what it gets."""

    fill: Callable[[], None]

    put = list.append

    def expect(self) -> None:
        """Nothing is handed over."""


def record_of(model: Model, request_id: bytes, caller: Caller, ended_ns: int) -> InferenceRecord:
    """Of a request that has been answered, but for the log."""
    record = InferenceRecord()
    record.caller, record.model, record.request_id = caller, model, request_id
    record.rows, record.request_bytes, record.arrived_ns = 1, 5, 0
    record.is_logged, record.trace = True, None
    record.ended_ns, record.status, record.error, record.response_bytes = ended_ns, "OK", None, 7
    record.batch, record.batch_rows = model.statistics.latest, 1
    return record


def test_a_single_line_does_not_wait_for_others() -> None:
    model = held_model(HeldBackend(), "alone")
    model.statistics.batch_done(BatchTimes(started=1, assembled=1, computed=2, split=2), [0], 1)
    written = threading.Event()

    async def log() -> bool:
        outbox: Outbox[str] = Outbox(lambda _: written.set(), name="access log", every_s=0.001)
        AccessLogger(outbox).answered(record_of(model, b"", Caller("here", {}), 3))
        was_written = await asyncio.to_thread(written.wait, CLIENT_TIMEOUT_S)
        outbox.close(CLIENT_TIMEOUT_S)
        return was_written

    assert asyncio.run(log())
    for worker in model.batcher.instances:
        worker.stop()


@given(st.binary(max_size=600), st.text(max_size=600), st.text(), st.integers(0, 10**13), st.integers(0, 10**13))
def test_any_request_makes_a_line_of_json(request_id: bytes, name: str, peer: str, wait_ns: int, compute_ns: int) -> None:
    lines = Lines()
    log = AccessLogger(cast("Outbox[str]", lines))
    caller = Caller(peer, {b"x-request-id": request_id})
    model = held_model(HeldBackend(), name)
    split = wait_ns + compute_ns
    model.statistics.batch_done(BatchTimes(started=wait_ns, assembled=wait_ns, computed=split, split=split), [0], 1)
    log.answered(record_of(model, request_id, caller, split))
    log.failed(caller, (name, name, name), 5, "INTERNAL", InvalidArgumentError(name), wait_ns)
    answered, failed = map(json.loads, lines)  # the answer's was kept back, but comes first
    assert answered["model"] == name
    assert answered["id"] == request_id[:256].decode("utf-8", "replace")
    assert answered["queue_ms"] == pytest.approx(wait_ns // 1000 / 1000)
    assert answered["total_ms"] == pytest.approx(split // 1000 / 1000)
    assert (failed["model"], failed["client"]) == (name[:256], peer)
    for worker in model.batcher.instances:
        worker.stop()
