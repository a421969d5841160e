"""From clients' requests to a certificate on them: serve with capture, bench on it, convert and verify with it as samples."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client
from halfserve.cli import main
from halfserve.export.certificate.embed import certificate_of
from halfserve.serve.observability.observe_options import ObserveOptions
from tests.models import save_text
from tests.serve.conftest import load_repository
from tests.serve.running_server import running_server

NET = "(float[batch, width] x) => (float[batch, width] y) { y = Softmax <axis = 1> (x) }"


def halfserve(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_traffic_is_captured_replayed_and_proved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_text(Path("models/net/1/model.onnx"), NET)
    captured = Path("captured")
    observe = ObserveOptions(capture=captured, capture_share=1)
    with running_server(lambda: load_repository(Path("models")), observe=observe) as server, Client(server.address) as client:
        for number in range(12):
            rows = np.random.default_rng(number).normal(size=(1 + number % 3, 5 + number % 2)).astype(np.float32)
            client.infer("net", {"x": rows})
    place = ("--repository", "models", "--name", "half")
    assert halfserve("convert", "models/net/1/model.onnx", *place, "--samples", captured) == 0
    assert halfserve("verify", "models/net/1/model.onnx", "models/half/1/model.onnx", "--samples", "captured/net") == 0
    traffic = certificate_of(Path("models/half/1/model.onnx")).traffic
    assert traffic is not None
    assert (traffic.model, traffic.requests, traffic.left_out) == ("net", 12, {})
    with running_server(lambda: load_repository(Path("models"))) as server:
        replay = ("--data", captured, "--replay", 1, "--warmup", 0, "--rounds", 1, "--against", "half")
        capsys.readouterr()
        assert halfserve("bench", "net", "--address", server.address, *replay) == 0
    printed = capsys.readouterr()
    assert "12 captured requests of net version 1" in printed.err
    assert re.search(r"half +y +\d+/12 ", printed.out)
