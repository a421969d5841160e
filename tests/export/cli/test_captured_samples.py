"""Captured requests as the samples of `halfserve verify`, `convert` and `export`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.certificate.embed import certificate_of
from halfserve.export.export_errors import ExportError
from halfserve.export.sources.picture_preparation import picture_samples
from halfserve.export.sources.sample_files import array_samples, clip_samples, read_sentences
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.tasks.served_models import Preprocessing
from halfserve.protos.captured_requests import SampledTraffic
from tests.captured import captured, write_capture
from tests.export.cli.commands import Outcome, Shell
from tests.export.stored_models import both, in_one_file

NET = "g (T[batch,width] x) => (T[batch,width] y) { a = Mul(x, x)  y = Sqrt(a) }"
PERIOD = ("2026-09-21T14:13:20+00:00", "2026-09-21T14:13:49+00:00")


def rows(count: int, width: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
    return np.linspace(-scale, scale, count * width, dtype=np.float32).reshape(count, width)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `float.onnx`, `float16.onnx`, and 30 requests of two widths, 3 of which do not fit."""
    monkeypatch.chdir(tmp_path)
    for model, name in zip(both(NET), ("float.onnx", "float16.onnx"), strict=True):
        in_one_file(model, tmp_path / name)
    requests = [captured({"x": rows(1 + number % 2, 3 + number % 2)}, float(number)) for number in range(30)]
    requests[7] = captured({"x": rows(1, 3)}, 7.0, status="INVALID_ARGUMENT")
    requests[8] = captured({"x": rows(1, 3)[0]}, 8.0)
    requests[9] = captured({"z": rows(1, 3)}, 9.0, version=2)
    write_capture(tmp_path / "traffic", *requests, shard=10)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_certificate_says_on_which_traffic_it_was_proved(shell: Shell) -> None:
    done = shell("verify", "float.onnx", "float16.onnx", "--samples", "traffic", "--certificate", "v.json", "--html", "v.html")
    assert done.code == 0, done.err
    read = read_certificate(Path("v.json").read_bytes())
    lines = "".join(hashlib.sha256(path.read_bytes()).hexdigest() + "\n" for path in sorted(Path("traffic/scores").iterdir()))
    assert read.traffic == SampledTraffic(
        model="scores",
        versions=(1, 2),
        requests=27,
        left_out={"that do not fit the model": 2, "that the server refused": 1},
        first_utc=PERIOD[0],
        last_utc=PERIOD[1],
        shards=3,
        shards_sha256=hashlib.sha256(lines.encode()).hexdigest(),
    )
    assert read.samples == 14 + 2 * 13
    assert read.sizes["width"][:2] == (3, 4)
    for place in (done.out, Path("v.html").read_text()):
        assert "the samples are 27 captured requests of scores versions 1, 2" in place.replace("\n", " ")


@pytest.mark.usefixtures("folder")
def test_a_conversion_is_proved_on_traffic_and_records_some_of_it(shell: Shell) -> None:
    assert shell("convert", "float.onnx", "--repository", "models", "--samples", "traffic", "--max-samples", "9").code == 0
    certificate = certificate_of(Path("models/float/1/model.onnx"))
    assert certificate.traffic is not None
    assert (certificate.traffic.requests, certificate.samples) == (3, 5)
    assert sum(certificate.traffic.left_out.values()) == 27
    assert Path("models/float/1/samples.npz").is_file()


@pytest.mark.usefixtures("folder")
def test_traffic_that_half_precision_cannot_hold_is_over_budget(shell: Shell) -> None:
    write_capture(Path("large"), captured({"x": rows(2, 3, 300.0)}), captured({"x": rows(2, 4)}, 1.0))
    done = shell("verify", "float.onnx", "float16.onnx", "--samples", "large", "--no-adversarial")
    assert done.code == 3
    assert "float16 ends at 65504" in done.err


def _damage(folder: Path) -> None:
    path = folder / "scores" / "000001.npz"
    path.write_bytes(path.read_bytes()[:-30])


TEXTS = np.array([[b"good morning"], [b"\xff"]], object)


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda path: path.mkdir(), "has no captured requests"),
        (lambda path: _damage(write_capture(path, captured({"x": rows(1, 3)}))), "is not a whole shard of captured requests"),
        (
            lambda path: write_capture(path, captured({"z": rows(1, 3)})),
            "samples has no array 'x'; it has z; the model takes x;",
        ),
        (
            lambda path: write_capture(path, captured({"x": rows(1, 3)[0]})),
            "do not fit the model: samples: 'x' has shape [3], the model takes [batch, width]",
        ),
        (lambda path: write_capture(path, captured({"x": TEXTS})), "input 'x' holds texts or files, which the server prepares"),
        (
            lambda path: [write_capture(path, captured({"x": rows(1, 3)}), model=name) for name in "ab"],
            "has requests of 'a', 'b', expected those of one model",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_captures_that_prove_nothing_are_refused_in_one_line(shell: Shell, write: Callable[[Path], object], text: str) -> None:
    write(Path("bad"))
    done: Outcome = shell("convert", "float.onnx", "out.onnx", "--samples", "bad")
    assert (done.code, done.out) == (1, "")
    assert text in done.err.splitlines()[-1]
    assert not Path("out.onnx").exists()


def test_modules_get_the_commonest_shape(tmp_path: Path) -> None:
    half = rows(2, 4).astype(np.float16)
    write_capture(tmp_path, captured({"x": rows(1, 3)}), captured({"x": half}, 1.0), captured({"x": half}, 2.0))
    samples = array_samples(tmp_path, 5)
    assert torch.equal(samples.inputs["x"], torch.from_numpy(np.concatenate([half, half])).float())
    assert samples.traffic is not None
    assert (samples.traffic.requests, samples.traffic.left_out) == (2, {"of another shape": 1})
    with pytest.raises(ExportError, match="input 'x' holds texts or files"):
        array_samples(write_capture(tmp_path / "t", captured({"x": TEXTS})), 3)


def test_texts_clips_and_pictures_are_prepared_as_those_of_files(tmp_path: Path) -> None:
    sentences, traffic = read_sentences(write_capture(tmp_path / "t", captured({"text": TEXTS})), 8)
    assert sentences == ["good morning", "\ufffd"]
    assert traffic is not None

    buffer = BytesIO()
    Image.new("RGB", (5, 4), (9, 8, 7)).save(buffer, "PNG")
    pictures = np.array([[buffer.getvalue()]], object)
    options = SourceOptions(samples=write_capture(tmp_path / "p", captured({"image": pictures})))
    found = picture_samples(Preprocessing(height=2, width=2), options)
    assert found.inputs["image"].shape == (1, 2, 2, 3)

    clips = clip_samples(SourceOptions(samples=write_capture(tmp_path / "a", captured({"audio": rows(2, 800)}))), 8000)
    assert clips.inputs["audio"].shape == (2, 800)
    assert clips.traffic is not None


@pytest.mark.usefixtures("folder")
def test_requests_beyond_the_last_fixed_batch_are_not_counted(shell: Shell) -> None:
    in_one_file(both(NET.replace("batch", "4"))[0], Path("fixed.onnx"))
    write_capture(Path("fixed"), *(captured({"x": rows(2, 3)}, float(number)) for number in range(3)))
    assert shell("convert", "fixed.onnx", "out.onnx", "--samples", "fixed").code == 0
    certificate = certificate_of(Path("out.onnx"))
    assert certificate.traffic is not None
    assert (certificate.samples, certificate.traffic.requests) == (4, 2)
    assert certificate.traffic.left_out == {"that do not fit the model": 1}
