"""The program that says where a request's microseconds go."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import request_cost
from tests.models import save_mlp

pytestmark = pytest.mark.long


def test_the_places_that_it_names_are_there() -> None:
    assert [place for place in request_cost.ROOMS if not Path(request_cost.SERVE, place).exists()] == []


def test_each_room_has_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request_cost.main(save_mlp(tmp_path / "mlp.onnx"), in_flight=4, rounds=4)
    told = capsys.readouterr().out
    assert "us a request, 4 at a time" in told
    assert [room for room in request_cost.ROOMS.values() if room not in told] == []
