"""Programs in benchmarks/ that use the load generator."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
import typer

import benchmarks.ceiling
from benchmarks import serving
from benchmarks.ceiling.answers import COUNT, save_answers
from halfserve.files.varint import encoded_varint
from halfserve.protos import inference_pb2 as pb
from tests.serve.running_server import RunningServer

SOURCE = (Path(benchmarks.ceiling.__file__).parent / "answer_at_once.c").read_text()


def test_the_program_finds_each_of_its_files(server: RunningServer, tmp_path: Path) -> None:
    with grpc.insecure_channel(server.address) as channel:
        save_answers(channel, "mlp", tmp_path)
    (listed,) = re.findall(r"METHODS\[\] = \{(.*?)\}", SOURCE, re.DOTALL)
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r'"(\w+)"', listed))
    answer = pb.ModelInferResponse.FromString((tmp_path / "ModelInfer").read_bytes()[5:])
    assert (answer.model_name, [list(output.shape) for output in answer.outputs]) == ("mlp", [[1, 10]])


def test_the_program_finds_the_counts_that_it_is_to_replace(server: RunningServer, tmp_path: Path) -> None:
    (mark,) = re.findall(r"MARK\[5\] = \{(.*?)\}", SOURCE)
    assert encoded_varint(COUNT) == bytes(int(byte, 16) for byte in mark.split(", "))
    with grpc.insecure_channel(server.address) as channel:
        save_answers(channel, "mlp", tmp_path)
    statistics = pb.ModelStatisticsResponse.FromString((tmp_path / "ModelStatistics").read_bytes()[5:]).model_stats[0]
    assert (statistics.inference_count, statistics.inference_stats.success.count) == (COUNT, COUNT)


def test_compares_with_the_last_one_named(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{server.address}/mlp"
    serving.main([f"ours={place}", f"peer={place}"], concurrency="2", rounds=1, seconds=0.1)
    text = capsys.readouterr().out
    assert "ours" in text
    assert "1.00" in text.split("peer")[1]


@pytest.mark.parametrize("text", ["127.0.0.1:1/mlp", "ours=127.0.0.1:1", "ours=/mlp"])
def test_a_malformed_server_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"'{text}': expected NAME=HOST:PORT/MODEL, such as ours="):
        serving.main([text])
