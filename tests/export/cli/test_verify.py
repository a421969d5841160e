from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.verification.samples import Array
from tests.export.cli.commands import Outcome, Shell
from tests.export.stored_models import both, in_one_file, parse

NET = "g (T[batch,width] x) => (T[batch,width] y) { a = Mul(x, x)  y = Sqrt(a) }"
Verify = Callable[..., Outcome]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `float.onnx`, `float16.onnx` and `samples.npz`."""
    monkeypatch.chdir(tmp_path)
    for model, name in zip(both(NET), ("float.onnx", "float16.onnx"), strict=True):
        in_one_file(model, tmp_path / name)
    np.savez("samples.npz", x=np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3))
    return tmp_path


@pytest.fixture
def verify(shell: Shell, folder: Path) -> Verify:
    """Compares the two models, with more arguments."""
    return lambda *arguments: shell("verify", "float.onnx", "float16.onnx", *arguments)


def test_within_budget_is_a_table_and_exit_code_0(verify: Verify) -> None:
    np.save("labels.npy", np.full(8, 0))
    files = ("--samples", "samples.npz", "--labels", "labels.npy", "--html", "v.html", "--certificate", "v.json")
    done = verify(*files)
    assert done.code == 0
    assert "float16: float16 compared with float32 on 8 samples" in done.out
    assert "within budget" in done.out
    read = read_certificate(Path("v.json").read_bytes())
    assert (read.passed, read.samples, read.reference_bytes) == (True, 8, Path("float.onnx").stat().st_size)
    assert read.accuracy is not None
    assert read.accuracy.reference == 0.5
    assert Path("v.html").read_text().startswith("<!DOCTYPE html>")


def test_over_budget_is_exit_code_3_and_the_verdict_is_written_all_the_same(verify: Verify) -> None:
    np.savez("large.npz", x=np.full((2, 3), 300, np.float32))
    done = verify("--samples", "large.npz", "--certificate", "v.json", "--json", "--no-adversarial")
    assert (done.code, done.json["passed"]) == (3, False)
    assert done.json == json.loads(Path("v.json").read_bytes())
    assert "halfserve verify: output 'y' (rounded): 6 of 6 values are NaN or infinite (limit 0)" in done.err


@pytest.mark.parametrize(
    ("net", "cause"),
    [
        ("w = Mul(x, huge)  y = Sub(w, w)", "the weight 'huge' of Mul 'w' overflowed: 2 of its 2 numbers became NaN or"),
        ("[up] a = Mul(x, large)  y = Sub(a, a)", "the result 'a' of Mul 'up' reaches 1.2e+05 in float32, and float16 ends at"),
    ],
)
def test_what_overflowed_in_a_foreign_file_is_named_once_with_its_cure(
    shell: Shell, folder: Path, net: str, cause: str
) -> None:
    weights = {name: np.full(2, size) for name, size in {"huge": 1e6, "large": 6e4}.items() if name in net}
    with np.errstate(over="ignore"):
        models = both(f"g (T[n,2] x) => (T[n,2] y) {{ {net} }}", **weights)
    for model, name in zip(models, ("float.onnx", "float16.onnx"), strict=True):
        in_one_file(model, folder / name)
    np.savez("x.npz", x=np.full((4, 2), 2, np.float32))
    done = shell("verify", "float.onnx", "float16.onnx", "--samples", "x.npz", "--html", "v.html")
    assert done.code == 3
    assert "verdict   over budget: output 'y' (rounded): 8 of 8 values are NaN or" in done.out
    assert done.out.count("over budget: output 'y'") == 1
    assert f"halfserve verify: over budget; {cause}" in done.err
    assert "convert with halfserve convert" in done.err
    assert "--float16-io" not in done.err
    assert "Cause and cure: the " in Path("v.html").read_text()


def test_without_samples_inputs_are_made_up(verify: Verify) -> None:
    printed = verify("--dim", "width=5", "--dim", "batch=3", "--json", "--min-headroom", 16).json
    assert printed["samples"] == 33
    assert printed["outputs"][0]["figures"]["elements"] == 33 * 5
    assert printed["headroom"] >= 16


@pytest.mark.long
def test_given_samples_are_repeated_to_the_longest(verify: Verify) -> None:
    lines = verify("--samples", "samples.npz", "--dim", "width=50", "--json").json["adversarial"]
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
        (
            ("--certificate", "float.onnx"),
            1,
            "cannot write the certificate to float.onnx: that is another file of this command",
        ),
        (("--html", "float16.onnx"), 1, "cannot write the page to float16.onnx: that is another file of this command"),
        (("--labels", "float.onnx"), 1, "float.onnx is no .npy file of numbers; write one with numpy.save"),
        (
            ("--min-headroom", 4, "--no-adversarial"),
            1,
            "headroom of 4 is asked for, which adversarial samples measure: leave them on or ask for 1",
        ),
    ],
)
def test_wrong_options_are_one_line(
    arguments: tuple[object, ...], code: int, message: str, verify: Verify, folder: Path
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = verify(*arguments)
    assert (done.code, done.out) == (code, "")
    assert f"halfserve verify: {message}" in " ".join(done.err.split())
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros(3), r"labels.npy holds float64 [3]; expected one array of whole numbers"),
        (np.zeros(3, np.int64), "labels have shape [3], the first output's classes [8]"),
    ],
)
def test_labels_that_do_not_fit_are_one_line(content: Array, message: str, verify: Verify) -> None:
    np.save("labels.npy", content)
    done = verify("--samples", "samples.npz", "--labels", "labels.npy")
    assert done.code == 1
    assert message in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float.onnx", "missing.onnx"), "cannot read the model"),
        (("samples.npz", "float16.onnx"), "is not an ONNX model or is damaged"),
        (("two.onnx", "float16.onnx", "--samples", "samples.npz"), "has no array 'z'"),
        (("float.onnx", "two.onnx", "--samples", "samples.npz"), "the model takes 2 inputs (x, z), 1 were given"),
    ],
)
def test_models_that_are_none_or_do_not_fit_are_one_line(
    arguments: tuple[str, ...], message: str, shell: Shell, folder: Path
) -> None:
    renamed = onnx.load("float.onnx")
    renamed.graph.input.add().CopyFrom(renamed.graph.input[0])
    renamed.graph.input[1].name = "z"
    in_one_file(renamed, folder / "two.onnx")
    done = shell("verify", *arguments)
    assert done.code == 1
    assert message in done.err


def test_made_up_inputs_that_a_model_cannot_take_ask_for_samples(shell: Shell, folder: Path) -> None:
    text = "g (float[batch,width] x) => (float[n,7] y) { s = Constant<value_ints=[-1, 7]>()  y = Reshape(x, s) }"
    picky = in_one_file(parse(text, opset=17, ir=8), folder / "picky.onnx")
    done = shell("verify", picky, picky)
    assert done.code == 1
    assert "the reference model fails on the samples" in done.err
    assert "the inputs were made up: give --samples, or sizes with --dim NAME=SIZE" in done.err
    assert shell("verify", picky, picky, "--dim", "width=14").code == 0


def test_a_gpu_that_is_not_there_is_one_line(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = verify("--samples", "samples.npz", "--provider", "cuda")
    assert done.code == 1
    assert "ONNX Runtime cannot use a GPU here" in done.err


def test_a_converted_file_shows_its_own_verdict(shell: Shell, folder: Path) -> None:
    target = folder / "out.onnx"
    assert shell("convert", "float.onnx", target, "--samples", "samples.npz").code == 0
    done = shell("verify", target, "--html", "v.html")
    assert (done.code, "out: float16 compared with float32 on 8 samples" in done.out) == (0, True)
    assert Path("v.html").read_text().startswith("<!DOCTYPE html>")
    printed = shell("verify", target, "--json").json
    assert (printed["passed"], printed["onnx_bytes"]) == (True, target.stat().st_size)
    done = shell("verify", target, "--samples", "samples.npz")
    assert (done.code, "samples, limits and targets are for a comparison; give the float32 model" in done.err) == (2, True)
    done = shell("verify", "float16.onnx")
    assert (done.code, "contains no certificate, and there is no certificate.json beside it" in done.err) == (1, True)
    target.write_bytes(target.read_bytes() + b"\x12\x01x")  # producer_name
    done = shell("verify", target)
    assert (done.code, "the certificate belongs to another model" in done.err) == (1, True)
