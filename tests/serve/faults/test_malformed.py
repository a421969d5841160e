from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.process_watch import Sample, look
from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve import Client
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from halfserve.serve.benchmark.load.calls import framed
from tests.scale import SCALE, scaled
from tests.serve.faults.exchange import Answer
from tests.serve.faults.malforming import connections, framing, messages, rest
from tests.serve.faults.malforming.case import Case, Counts, infer_case
from tests.serve.faults.malforming.interfaces import MAX_BATCH, good_request, save_interfaces, seeded
from tests.serve.faults.malforming.oracle import due
from tests.serve.faults.malforming.sending import send_all
from tests.serve.faults.malforming.streams import REQUESTS, stream_case
from tests.serve.running_server import WAIT_S

Request = ModelInferRequest
COUNT = scaled(3000)  # the run of docs/explanation/reliability.md has TEST_SCALE=33
SPARE_DESCRIPTORS, SPARE_THREADS, MAX_GROWN_MB = 2, 4, 16.0


def affine(rows: int = 1) -> ModelInferRequest:
    request = ModelInferRequest(model_name="affine", id="7", raw_input_contents=[np.ones(8 * rows, np.float16).tobytes()])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 8])
    return request


def answered(rows: int = 1, *, value: float = 3.0, request_id: str = "7") -> bytes:
    response = ModelInferResponse(model_name="affine", model_version="1", id=request_id)
    response.outputs.add(name="y", datatype="FP16", shape=[rows, 8])
    response.raw_output_contents.append(np.full(8 * rows, value, np.float16).tobytes())
    return response.SerializeToString()


@pytest.mark.long
@pytest.mark.timeout(600 * max(1.0, SCALE))
def test_every_kind_of_malformed_call_gets_its_status(tmp_path: Path) -> None:
    save_interfaces(tmp_path)
    counts, good, samples = Counts(), Counts(), list[Sample]()
    with server_process(tmp_path) as server, Client(server.address) as client:
        for seed, count in enumerate((COUNT // 10, COUNT)):  # a server allocates at first what it keeps
            send_all(server, count, seed, counts, good)
            samples.append(settled(server, client, samples))
        server.process.terminate()
        assert server.process.wait(WAIT_S) == 0
        assert "Traceback" not in server.log_text()
    assert [*counts.complaints, *good.complaints] == []
    assert set(messages.MAKERS) < set(counts.by_kind())
    assert good.total > 50
    before, after = samples
    assert after.resident_mb <= before.resident_mb + MAX_GROWN_MB
    assert after.descriptors <= before.descriptors + SPARE_DESCRIPTORS
    assert after.threads <= before.threads + SPARE_THREADS


def settled(server: ServerProcess, client: Client, before: Sequence[Sample]) -> Sample:
    """The server's resources once it has let go of broken connections, whose last bytes it gives a second to leave."""
    until_s = time.monotonic() + WAIT_S
    sample = look(server.process.pid)
    while before and sample.descriptors > before[0].descriptors + SPARE_DESCRIPTORS and time.monotonic() < until_s:
        client.is_live()  # answered by the event loop that closes the connections
        sample = look(server.process.pid)
    return sample


@given(st.integers(0, 2**32))
def test_good_requests_are_due_an_answer(seed: int) -> None:
    wanted = due(good_request(seeded(seed)).SerializeToString())
    assert wanted.codes == {0}
    assert wanted.outputs


def test_the_answer_is_foretold() -> None:
    wanted = due(affine(2).SerializeToString())
    assert wanted.outputs is not None
    assert (wanted.id, wanted.outputs["y"].tolist()) == ("7", [[3.0] * 8] * 2)


def change(**fields: str) -> Callable[[Request], None]:
    return lambda request: request.MergeFrom(Request(**fields))  # type: ignore[arg-type]  # (names of texts)


FAULTS: dict[str, tuple[Callable[[Request], object], set[int]]] = {
    "unknown model": (change(model_name="nobody"), {5}),
    "unknown version": (change(model_version="2"), {5}),
    "thousands of digits": (change(model_version="9" * 5000), {5}),
    "no number": (change(model_version="latest"), {3}),
    "both": (change(model_name="nobody", model_version="latest"), {3, 5}),
    "datatype": (lambda r: setattr(r.inputs[0], "datatype", "FP32"), {3}),
    "rank": (lambda r: r.inputs[0].shape.append(1), {3}),
    "rows": (lambda r: r.CopyFrom(affine(MAX_BATCH + 1)), {3}),
    "bytes": (lambda r: r.raw_input_contents.append(b""), {3}),
    "input twice": (lambda r: r.inputs.add(name="x", datatype="FP16", shape=[1, 8]), {3}),
    "output": (lambda r: r.outputs.add(name="z"), {3}),
    "contents": (lambda r: r.inputs[0].contents.fp32_contents.append(1.0), {3}),
    "priority": (lambda r: setattr(r.parameters["priority"], "string_param", "high"), {3}),
    "timeout": (lambda r: setattr(r.parameters["timeout"], "int64_param", 5), {0, 4}),
    "a third of a place": (lambda r: setattr(r.inputs[0].parameters["shared_memory_region"], "string_param", "r"), {3, 12}),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_expected_status_follows_from_the_protocol(name: str) -> None:
    spoil, codes = FAULTS[name]
    request = affine()
    spoil(request)
    assert due(request.SerializeToString()).codes == codes


def test_a_broken_message_gets_invalid_argument() -> None:
    assert due(b"\xff").codes == {3}
    assert due(affine().SerializeToString()[:-1]).codes == {3}


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(200, 0, body=framed(answered())), ""),
        (Answer(200, 3, "no"), "status 3 (no), expected 0"),
        (Answer(200, 0, body=framed(answered(value=3.5))), "other values"),
        (Answer(200, 0, body=framed(answered(rows=2))), "other values"),
        (Answer(200, 0, body=framed(answered(request_id="8"))), "has id '8', expected '7'"),
        (Answer(200, 0, body=framed(b"")), "the answer has id ''"),
        (Answer(200, 0, body=framed(answered()) * 2), "2 messages"),
        (Answer(200, 0), "no answer beside status 0"),
        (Answer(200, None, reset=2), "reset 2"),
    ],
    ids=["right", "refused", "values", "shape", "id", "empty", "two", "none", "reset"],
)
def test_a_misfitting_answer_is_reported(answer: Answer, complaint: str) -> None:
    said = infer_case("good", affine().SerializeToString()).check(answer)
    assert complaint in said
    assert bool(said) is bool(complaint)


def test_an_error_needs_a_text() -> None:
    check = infer_case("bad", b"\xff").check
    assert check(Answer(200, 3, "no message")) == ""
    assert "without a text" in check(Answer(200, 3))
    assert "expected 3" in check(Answer(200, 13, "the server failed"))


def test_a_stream_is_due_as_many_answers_as_requests() -> None:
    check = stream_case(seeded(0)).check
    one = framed(ModelStreamInferResponse(error_message="no").SerializeToString())
    assert f"0 answers to {REQUESTS} requests" in check(Answer(200, 0))
    assert "expected 0" in check(Answer(200, 13, "oh", one))
    assert "request 0 of the stream" in check(Answer(200, 0, body=one * REQUESTS))  # without a status


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_everything_is_made_again_from_its_seed(seed: int) -> None:
    def made() -> list[object]:
        chance = seeded(seed)
        calls: list[Case] = [make(chance) for make in framing.MAKERS]
        calls += [messages.message_case(kind, chance) for kind in messages.MAKERS]
        by_hand = [make(chance) for make in connections.MAKERS]
        return [*((case.kind, case.data) for case in calls), *by_hand, *(make(chance) for make in rest.MAKERS)]

    assert made() == made()
