from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.onnx_files.model_file import serialize
from halfserve.export.verification.samples import Array
from tests.export.cli.commands import command
from tests.export.stored_models import both, in_one_file, parse

NET = "g (T[batch,width] x) => (T[batch,width] y) { a = Mul(x, x)  y = Sqrt(a) }"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    wide, half = both(NET)
    return in_one_file(wide, tmp_path / "float.onnx"), in_one_file(half, tmp_path / "float16.onnx")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "samples.npz", x=np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3))
    return tmp_path / "samples.npz"


def test_headroom_without_adversarial_samples_is_refused(
    pair: tuple[Path, Path], samples: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", *pair, "--samples", samples, "--min-headroom", 4, "--no-adversarial") == 1
    assert "adversarial samples measure: leave them on or ask for 1" in " ".join(capfd.readouterr().err.split())


def test_within_budget_is_a_table_and_exit_code_0(
    pair: tuple[Path, Path], samples: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "labels.npy", np.full(8, 0))
    html, certificate = tmp_path / "v.html", tmp_path / "v.json"
    labels = tmp_path / "labels.npy"
    assert command("verify", *pair, "--samples", samples, "--labels", labels, "--html", html, "--certificate", certificate) == 0
    out = capfd.readouterr().out
    assert "float16: fp16 against its float32 reference, 8 samples" in out
    assert "within budget" in out
    read = read_certificate(certificate.read_bytes())
    assert (read.passed, read.samples, read.reference_bytes) == (True, 8, pair[0].stat().st_size)
    assert read.accuracy is not None
    assert read.accuracy.reference == 0.5
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_over_budget_is_exit_code_3_and_the_verdict_is_written_all_the_same(
    pair: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "large.npz", x=np.full((2, 3), 300, np.float32))
    certificate = tmp_path / "v.json"
    assert (
        command(
            "verify", *pair, "--samples", tmp_path / "large.npz", "--certificate", certificate, "--json", "--no-adversarial"
        )
        == 3
    )
    out, err = capfd.readouterr()
    printed = json.loads(out)
    assert printed["passed"] is False
    assert printed == json.loads(certificate.read_bytes())
    assert "halfserve verify: output 'y' (rounded): 6 of 6 values are NaN or infinite (limit 0)" in err


def test_without_samples_inputs_are_made_up(pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert command("verify", *pair, "--dim", "width=5", "--dim", "batch=3", "--json", "--min-headroom", 16) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["samples"] == 33
    assert printed["outputs"][0]["figures"]["elements"] == 33 * 5
    assert printed["headroom"] >= 16


@pytest.mark.long
def test_given_samples_are_repeated_to_the_longest(
    pair: tuple[Path, Path], samples: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", *pair, "--samples", samples, "--dim", "width=50", "--json") == 0
    lines = json.loads(capfd.readouterr().out)["adversarial"]
    assert {line["figures"]["elements"] for line in lines if line["case"] == "longest"} == {2 * 50}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--dim", "width"), 2, "--dim 'width' is not of the form NAME=SIZE"),
        (("--dim", "depth=3"), 1, "no input has a dimension 'depth'; there are batch, width, x.0, x.1"),
        (("--samples", "/nowhere.npz"), 1, "cannot read the samples /nowhere.npz: No such file"),
        (("--labels", "/nowhere.npy"), 1, "cannot read the labels /nowhere.npy: No such file"),
        (("--html", "/nowhere/v.html"), 1, "cannot write the page /nowhere/v.html: expected a file in a folder that exists"),
        (("--certificate", "/proc/c.json"), 1, "cannot write the certificate /proc/c.json: No such file"),
        (("--max-scaled-error", "-1"), 2, "max_scaled_error is -1.0; expected a number of at least 0"),
    ],
)
def test_wrong_options_are_one_line(
    pair: tuple[Path, Path], arguments: tuple[str, ...], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", *pair, *arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert f"halfserve verify: {message}" in err


@pytest.mark.parametrize(("option", "place"), [("--certificate", 0), ("--html", 1)])
def test_a_verdict_replaces_no_model(
    pair: tuple[Path, Path], option: str, place: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = pair[place].read_bytes()
    assert command("verify", *pair, option, pair[place]) == 1
    assert "that is another file of this command; give it a name of its own" in capfd.readouterr().err
    assert pair[place].read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros(3), r"labels.npy holds float64 [3]; expected one array of whole numbers"),
        (np.zeros(3, np.int64), "labels have shape [3], the first output's classes [8]"),
    ],
)
def test_labels_that_do_not_fit_are_one_line(
    pair: tuple[Path, Path], samples: Path, tmp_path: Path, content: Array, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "labels.npy", content)
    assert command("verify", *pair, "--samples", samples, "--labels", tmp_path / "labels.npy") == 1
    assert message in capfd.readouterr().err


def test_labels_that_are_no_array_are_one_line(
    pair: tuple[Path, Path], samples: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", *pair, "--samples", samples, "--labels", pair[0]) == 1
    assert "is no .npy file of numbers; write one with numpy.save" in capfd.readouterr().err


def test_models_that_are_none_or_do_not_fit_are_one_line(
    pair: tuple[Path, Path], samples: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", pair[0], tmp_path / "missing.onnx") == 1
    assert "cannot read the model" in capfd.readouterr().err
    assert command("verify", samples, pair[1]) == 1
    assert "is not an ONNX model or is damaged" in capfd.readouterr().err
    renamed = onnx.load(pair[0])
    renamed.graph.input.add().CopyFrom(renamed.graph.input[0])
    renamed.graph.input[1].name = "z"
    (tmp_path / "two.onnx").write_bytes(serialize(renamed))
    assert command("verify", tmp_path / "two.onnx", pair[1], "--samples", samples) == 1
    assert "has no array 'z'" in capfd.readouterr().err
    assert command("verify", pair[0], tmp_path / "two.onnx", "--samples", samples) == 1
    assert "the model takes 2 inputs (x, z), 1 were given" in capfd.readouterr().err


def test_made_up_inputs_that_a_model_cannot_take_ask_for_samples(
    pair: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "g (float[batch,width] x) => (float[n,7] y) { s = Constant<value_ints=[-1, 7]>()  y = Reshape(x, s) }"
    picky = in_one_file(parse(text, opset=17, ir=8), tmp_path / "picky.onnx")
    assert command("verify", picky, picky) == 1
    err = capfd.readouterr().err
    assert "the reference model fails on the samples" in err
    assert "the inputs were made up: give --samples, or sizes with --dim NAME=SIZE" in err
    assert command("verify", picky, picky, "--dim", "width=14") == 0


def test_a_gpu_that_is_not_there_is_one_line(
    pair: tuple[Path, Path], samples: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command("verify", *pair, "--samples", samples, "--provider", "cuda") == 1
    assert "ONNX Runtime cannot use a GPU here" in capfd.readouterr().err


def test_a_converted_file_shows_its_own_verdict(
    pair: tuple[Path, Path], samples: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target, html = tmp_path / "out.onnx", tmp_path / "v.html"
    assert command("convert", pair[0], target, "--samples", samples) == 0
    assert command("verify", target, "--html", html) == 0
    assert "out: fp16 against its float32 reference, 8 samples" in capfd.readouterr().out
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert command("verify", target, "--json") == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["passed"], printed["onnx_bytes"]) == (True, target.stat().st_size)
    assert command("verify", target, "--samples", samples) == 2
    assert "samples, limits and targets are for a comparison; give the float32 model" in capfd.readouterr().err
    assert command("verify", pair[1]) == 1
    assert "float16.onnx contains no certificate, and there is no certificate.json beside it" in capfd.readouterr().err
    target.write_bytes(target.read_bytes() + b"\x12\x01x")  # producer_name
    assert command("verify", target) == 1
    assert "the certificate belongs to another model" in capfd.readouterr().err
