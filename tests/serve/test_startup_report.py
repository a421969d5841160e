"""What a started server says of its models."""

from __future__ import annotations

import json

import pytest

from halfserve.serve.startup_report import StartupReport, print_json, print_text
from tests.serve.engine.fakes import MEASURED, HeldBackend, held_model, measured_model


def test_the_report_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    models = [held_model(HeldBackend(), "plain"), measured_model("tried")]
    report = StartupReport(models=models, host="127.0.0.1", grpc_port=1, seconds=0.5)
    print_text(report, "http")
    plain, tried, measured, *_ = capsys.readouterr().out.splitlines()
    assert (plain, tried) == tuple(f"{name}/1  test, fp32, batches of up to 8" for name in ("plain", "tried"))
    assert measured == f"  measured: {MEASURED}"
    print_json(report)
    told = json.loads(capsys.readouterr().out)["models"]
    assert [model.get("measured") for model in told] == [None, MEASURED]
