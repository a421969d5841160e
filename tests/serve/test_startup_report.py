"""What a started server says of its models."""

from __future__ import annotations

import json

import pytest

from halfserve.serve.startup_report import StartupReport, print_json, print_text
from tests.serve.conftest import vouched
from tests.serve.engine.fakes import MEASURED, HeldBackend, held_model, measured_model


def test_the_report_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    models = [held_model(HeldBackend(), "plain"), *vouched([measured_model("tried")])]
    report = StartupReport(models=models, host="127.0.0.1", grpc_port=1, seconds=0.5)
    print_text(report, "http")
    plain, tried, measured, *_ = capsys.readouterr().out.splitlines()
    assert plain == "plain/1  test, fp32, batches of up to 8"
    assert tried == "tried/1  test, fp32, batches of up to 8, certificate passed"
    assert measured == f"  measured: {MEASURED}"
    print_json(report)
    told = json.loads(capsys.readouterr().out)["models"]
    assert [model.get("measured") for model in told] == [None, MEASURED]
