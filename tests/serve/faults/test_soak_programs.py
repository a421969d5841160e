"""The soak and million-request programs judge servers rightly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks import million
from benchmarks.soaking.exchange import Answer, messages_in
from benchmarks.soaking.judgement import SETTLED_AFTER, Report, report
from benchmarks.soaking.known_answers import ID_BYTES, Known, known_requests, large_requests
from benchmarks.soaking.memory_judgement import judge_memory
from benchmarks.soaking.process_watch import Sample, read_samples, write_samples
from benchmarks.soaking.straight_line import rise
from benchmarks.soaking.tally import Counted
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.serve.benchmark.load.calls import framed

SECONDS = 120.0
# By `python -m benchmarks.soak --think 0.05 ... --samples FILE`, thinned out: on a machine with other work, with three programs
# besides that never wait, with many reloads (300 s), and of servers that were spoilt to leak.
RECORDED = Path(__file__).parent / "recorded"


def soaked(
    *,
    mb_per_hour: float = 0.0,
    saw_mb: float = 0.0,
    leaps_mb: float = 0.0,
    files: float = 0.0,
    slower: float = 1.0,
    fastest_too: bool = True,
    log: str = "",
) -> Report:
    times = np.arange(0.0, SECONDS, 0.25)
    leaps = leaps_mb * ((times > 60).astype(float) + (times > 100))
    memory = 100 + mb_per_hour * times / 3600 + saw_mb * (times % 37) / 37 + leaps
    samples = [Sample(t, float(mb), int(20 + files * t), 10) for t, mb in zip(times, memory, strict=True)]
    late = times > SECONDS / 2
    held_up = late if fastest_too else late & (np.arange(len(times)) % 4 > 0)
    latencies = [(float(t), 0.01 * (slower if slow else 1.0)) for t, slow in zip(times, held_up, strict=True)]
    return report(Counted({"affine": len(times)}, {}, [], 0, latencies), samples, [1.0], 0.0, SECONDS, log)


def test_a_stable_server_has_no_complaints() -> None:
    assert soaked().is_good
    assert soaked(saw_mb=20).is_good
    assert soaked(leaps_mb=30).is_good  # an allocator that takes two more arenas
    assert soaked().ended(0).is_good


def test_other_programs_make_no_drift() -> None:
    assert soaked(slower=10, fastest_too=False).is_good
    assert not soaked(slower=10).is_good


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mb_per_hour": 900.0}, "memory rises by 898 MB an hour, at least 89"),
        ({"mb_per_hour": 3000.0, "saw_mb": 20.0}, "memory rises by "),
        ({"files": 0.5}, "descriptors: 4"),
        ({"slower": 4.0}, "answers take longer: p50 10.00 ms in the first quarter, 40.00 ms in the last"),
        ({"log": "Traceback (most recent call last):\n  oh"}, "the server's log holds a stack trace"),
    ],
    ids=["memory", "memory under a saw", "files", "latency", "trace"],
)
def test_an_unstable_server_has_a_complaint(change: dict[str, float], complaint: str) -> None:
    (said,) = soaked(**change).complaints  # type: ignore[arg-type]  # (one of them is text)
    assert said.startswith(complaint)


def test_a_crash_at_the_end_is_a_complaint() -> None:
    assert soaked().ended(-6).complaints == ["the server ended with code -6 after SIGTERM, expected 0"]


def judged(name: str) -> list[str]:
    """What is said of two recorded minutes, where every request was answered in time."""
    samples = read_samples(RECORDED / name)
    ended = samples[-1].at_s
    counted = Counted({"affine": 1}, {}, [], 0, [(0.0, 0.01), (ended, 0.01)])
    return list(report(counted, samples, [1.0], 0.0, ended, "").complaints)


@pytest.mark.parametrize("name", ["shared_machine.csv", "crowded_machine.csv", "many_reloads.csv"])
def test_recorded_servers_without_a_leak_are_good(name: str) -> None:
    assert judged(name) == []


def test_a_kilobyte_lost_with_each_request_is_found_in_two_minutes() -> None:
    (said,) = judged("leaking_memory.csv")
    assert said.startswith("memory rises by ")


def test_a_file_left_open_every_500_requests_is_found_in_two_minutes() -> None:
    (said,) = judged("leaking_files.csv")
    assert said.startswith("descriptors: ")


@pytest.mark.parametrize("seed", range(4))
def test_a_leak_added_to_a_recorded_server_is_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = read_samples(RECORDED / "crowded_machine.csv")
    settled = [sample for sample in samples if sample.at_s >= SETTLED_AFTER * samples[-1].at_s]
    noise = random.normal(0, 1, len(settled))
    for mb_a_second, is_leak in ((0.0, False), (0.5, True)):
        leaking = [
            Sample(s.at_s, s.resident_mb + mb_a_second * s.at_s + float(n), s.descriptors, s.threads)
            for s, n in zip(settled, noise, strict=True)
        ]
        _, complaints = judge_memory(leaking, 1, SECONDS)
        assert bool(complaints) is is_leak


def test_samples_come_back_from_their_file(tmp_path: Path) -> None:
    samples = [Sample(100.0, 12.5, 3, 4, 0.25), Sample(100.5, 13.0, 5, 6, 0.5)]
    write_samples(tmp_path / "samples.csv", samples)
    back = read_samples(tmp_path / "samples.csv")
    assert back == [Sample(0.0, 12.5, 3, 4, 0.25), Sample(0.5, 13.0, 5, 6, 0.5)]


def test_a_rise_has_the_bounds_that_its_noise_gives() -> None:
    random = np.random.default_rng(0)
    times = [t / 3600 for t in range(3600)]
    rising = rise(times, [2.0 * t for t in times])
    assert (rising.low, rising.per_unit, rising.high) == pytest.approx((2, 2, 2))
    assert rising.times(10).high == pytest.approx(20)
    noisy = rise(times, [float(value) for value in random.standard_normal(3600)])
    assert noisy.low < 0 < noisy.high


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


def test_a_truncated_message_is_an_error() -> None:
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
