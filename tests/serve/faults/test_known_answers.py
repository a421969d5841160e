from __future__ import annotations

import json

import pytest
import typer

from benchmarks import million
from benchmarks.soaking.exchange import Answer, messages_in
from benchmarks.soaking.known_answers import ID_BYTES, Known, known_requests, large_requests
from benchmarks.soaking.process_watch import Sample
from protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from serve.benchmark.load.calls import framed

COUNT = 4000


def answer_to(known: Known, number: int, *, spoilt: bool = False) -> bytes:
    request = ModelInferRequest.FromString(messages_in(known.request(number))[0])
    raw = known.expected.tobytes()
    response = ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.outputs.add(name="y", datatype=request.inputs[0].datatype, shape=known.expected.shape)
    response.raw_output_contents.append(raw[:-1] + bytes([raw[-1] ^ 1]) if spoilt else raw)
    return framed(response.SerializeToString())


@pytest.mark.parametrize("first", [True, False])
def test_only_the_very_answer_is_right(first: bool) -> None:
    for known in [*known_requests(0, 1), *large_requests(0, 3)]:
        if not first:
            assert known.is_right(1, answer_to(known, 1))
        assert not known.is_right(7, answer_to(known, 7, spoilt=True))
        assert not known.is_right(7, answer_to(known, 8))  # another request's
        assert not known.is_right(7, b"")
        assert not known.is_right(7, answer_to(known, 7)[:-2])
        assert known.is_right(7, answer_to(known, 7))
        assert known.is_right(10**ID_BYTES - 1, answer_to(known, 10**ID_BYTES - 1))


def test_what_is_cut_off_is_no_message() -> None:
    assert messages_in(framed(b"a") + framed(b"")) == [b"a", b""]
    for broken in (framed(b"abc")[:-1], b"\1" + framed(b"abc")[1:], b"\0\0"):
        with pytest.raises(ValueError, match="are no message"):
            messages_in(broken)


def watched(mb_per_million: float, *, count: int = 1_000_000, files: int = 0) -> million.Run:
    run = million.Run()
    run.right["affine"] = count
    for number in range(0, count + 1, count // million.SAMPLES):
        at = number / count
        run.samples.append((number, Sample(at, 100 + mb_per_million * number / 1e6, 20 + int(files * at), 10)))
    return run


def complaints(run: million.Run) -> list[str]:
    found = million._figures(run, 1_000_000, 1.0)["complaints"]
    assert isinstance(found, list)
    return found


def test_memory_that_grows_with_requests_is_a_complaint() -> None:
    assert complaints(watched(0.5)) == []
    assert complaints(watched(1.5)) == ["memory rises by 1.50 MB a million requests, at least 1.50"]
    (said,) = complaints(watched(0.0, files=50))
    assert said.startswith("descriptors: 2")


def test_wrong_answers_are_counted_and_told() -> None:
    run, (known, *_) = million.Run(), known_requests(0, 1)
    for number in range(10):
        run.take((number, known), Answer(code=13, text="oh"))
    assert (run.answers, run.wrongs, len(run.wrong)) == (10, 10, million.LISTED)
    assert run.wrong[0] == f"{known.kind}: status 13 oh"


def test_a_real_server_answers_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        million.main(count=COUNT, large_every=100, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["right"], said["wrong_or_lost"]) == (COUNT, 0)
    assert any(kind.startswith("large") for kind in said["by_kind"])
    # So few requests end while the server still takes what it keeps: what they say of memory is no verdict.
    assert ended.value.exit_code == bool(said["complaints"])
    assert [complaint for complaint in said["complaints"] if not complaint.startswith("memory")] == []
