"""The program that measures what being observed costs, on little."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import observability
from benchmarks.observability import app, pairs_of
from tests.models import save_mlp

pytestmark = pytest.mark.long


def window(requests: int, loop_ns: int, wall_ns: int) -> dict[str, int]:
    return {"requests": requests, "loop_ns": loop_ns, "wall_ns": wall_ns}


def test_costs_are_told_apart() -> None:
    plain = [window(1000, 10_000_000, 20_000_000), window(3000, 30_000_000, 60_000_000), window(0, 5_000, 30_000_000)]
    observed = [window(4000, 42_000_000, 88_000_000), window(4000, 42_000_000, 88_000_000), window(0, 5_000, 90_000_000)]
    for last_plain, last_observed in (([window(9, 9, 9)], []), ([], [window(9, 9, 9)])):
        spent = pairs_of({"plain": plain + last_plain, "observed": observed + last_observed, "threads_ns": 4_000_000})
        assert spent.requests.tolist() == [[1000, 4000], [3000, 4000]]
        plain_us, percent, rate = spent.costs()
        assert plain_us == pytest.approx(10)
        assert percent == pytest.approx(5 + 5)  # on the event loop, and on other threads
        assert rate == pytest.approx(100 * (20 / 22 - 1))


@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load (Debian's package nghttp2-client)")
def test_wrong_input_ends_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no way .* holds 'everything'; there are: nothing; histograms"):
        observability.main(tmp_path, only="everything")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(SystemExit, match="the server did not start; its message is above"):
        observability.main(broken, only="nothing")


@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load (Debian's package nghttp2-client)")
def test_a_server_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "RESAMPLES", 10)
    model = save_mlp(tmp_path / "small.onnx")
    done = CliRunner().invoke(app, [str(model), "--starts", "1", "--seconds", "2", "--only", "all of", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert rows.keys() == {"nothing", "all of these"}
    assert all(row["pairs"] > 0 and row["plain_us"] > 0 for row in rows.values())
