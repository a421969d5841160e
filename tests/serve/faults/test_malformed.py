from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import malformed
from benchmarks.malforming import connections, framing, messages, rest
from benchmarks.malforming.case import SHOWN_BYTES, Case, infer_case
from benchmarks.malforming.chance import seeded
from benchmarks.malforming.counts import LISTED, Counts
from benchmarks.malforming.good_requests import good_request
from benchmarks.malforming.interfaces import MAX_BATCH
from benchmarks.malforming.oracle import due
from benchmarks.malforming.streams import REQUESTS, stream_case
from benchmarks.soaking.exchange import Answer
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from halfserve.serve.benchmark.load.calls import framed

Request = ModelInferRequest
COUNT = 3000


def affine(rows: int = 1) -> ModelInferRequest:
    request = ModelInferRequest(model_name="affine", id="7", raw_input_contents=[np.ones(8 * rows, np.float16).tobytes()])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 8])
    return request


def answered(rows: int = 1, *, value: float = 3.0, request_id: str = "7") -> bytes:
    response = ModelInferResponse(model_name="affine", model_version="1", id=request_id)
    response.outputs.add(name="y", datatype="FP16", shape=[rows, 8])
    response.raw_output_contents.append(np.full(8 * rows, value, np.float16).tobytes())
    return response.SerializeToString()


def test_every_kind_of_malformed_call_gets_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        malformed.main(count=COUNT, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["complaints"] == []
    assert ended.value.exit_code == 0
    assert (said["right"] >= COUNT, said["wrong"]) == (True, 0)
    assert set(messages.MAKERS) < set(said["by_kind"])
    assert said["good_requests"] > 50


@given(st.integers(0, 2**32))
def test_good_requests_are_due_an_answer(seed: int) -> None:
    wanted = due(good_request(seeded(seed)).SerializeToString())
    assert wanted.codes == {0}
    assert wanted.outputs


@pytest.mark.parametrize(("size", "rest"), [(3, ""), (SHOWN_BYTES, ""), (SHOWN_BYTES + 7, " and 7 bytes more")])
def test_an_error_quotes_the_given_value(size: int, rest: str) -> None:
    case = Case("kind", bytes(size), lambda answer: f"got {answer.code}" if answer.code else "")
    assert case.complaint(Answer(code=0)) == ""
    assert case.complaint(Answer(code=13)) == f"got 13; sent: {'00' * min(size, SHOWN_BYTES)}{rest}"


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


def test_the_first_complaints_of_each_kind_are_kept() -> None:
    counts = Counts()
    for _ in range(LISTED + 2):
        counts.take("a", "bad", 2)
    counts.take("b", "")
    assert counts.by_kind() == {"a": [0, 2 * (LISTED + 2)], "b": [1, 0]}
    assert counts.complaints == ["a: bad"] * LISTED
