"""`python benchmarks/serving.py`, which compares servers with the load generator of `halfserve bench`."""

from __future__ import annotations

import pytest
import typer

from benchmarks import serving
from tests.serve.running_server import RunningServer


def test_compares_with_the_last_one_named(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{server.address}/mlp"
    serving.main([f"ours={place}", f"peer={place}"], concurrency="2", rounds=1, seconds=0.1)
    text = capsys.readouterr().out
    assert "ours" in text
    assert "1.00" in text.split("peer")[1]


@pytest.mark.parametrize("text", ["127.0.0.1:1/mlp", "ours=127.0.0.1:1", "ours=/mlp"])
def test_what_is_no_server(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"'{text}': expected NAME=HOST:PORT/MODEL, such as ours="):
        serving.main([text])
