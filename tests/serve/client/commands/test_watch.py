from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from protos.inference_pb2 import ModelStatistics
from serve.client.commands.watch import looked_at, looks_json, looks_table


def statistics(name: str = "m", *, requests: int = 0, rows: int = 0, batches: int = 0, ms: int = 0, failed: int = 0) -> Any:
    made = ModelStatistics(name=name, version="1", inference_count=rows, execution_count=batches)
    made.inference_stats.success.count = requests
    made.inference_stats.fail.count = failed
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        getattr(made.inference_stats, stage).ns = ms * 1_000_000
    return made


def test_rates_and_means_between_two_looks() -> None:
    before = looked_at([statistics(requests=10, rows=20, batches=10, ms=5)], [], 100.0)
    now = looked_at([statistics(requests=30, rows=60, batches=20, ms=25, failed=4)], [], 102.0)
    assert looks_json(before, now) == {
        "seconds": 2.0,
        "models": [
            {
                "name": "m",
                "version": "1",
                "requests_per_s": 10.0,
                "rows_per_s": 20.0,
                "failures_per_s": 2.0,
                "mean_batch": 4.0,
                "queue_ms": 1.0,
                "compute_ms": 3.0,
            }
        ],
    }


@pytest.mark.parametrize("earlier", [[], [statistics(requests=99, rows=99, batches=9)]])
def test_a_model_that_was_loaded_in_between_counts_from_nothing(earlier: list[Any]) -> None:
    now = looked_at([statistics(requests=4, rows=4, batches=1)], [], 1.0)
    assert looks_json(looked_at(earlier, [], 0.0), now)["models"][0]["rows_per_s"] == 4.0


def test_an_idle_model_has_no_means() -> None:
    look = looked_at([statistics(requests=4, rows=4)], [], 1.0)
    row = looks_json(look, look)["models"][0]
    assert (row["mean_batch"], row["queue_ms"], row["requests_per_s"]) == (None, None, 0.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(looks_table(look, look))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split()[-8:] == ["m", "1", "0", "0", "0", "-", "-", "-"]


def test_only_the_models_asked_for() -> None:
    assert [name for name, _ in looked_at([statistics("a"), statistics("b")], ["b"], 0.0).models] == ["b"]
