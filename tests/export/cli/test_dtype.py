"""`--dtype bfloat16` of convert, export and verify."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from halfserve.export.certificate.certificate import BudgetExceeded, read_certificate
from halfserve.export.certificate.embed import check_embedded
from halfserve.export.cli.convert import convert
from halfserve.export.cli.export import export
from halfserve.export.cli.verify import verify
from halfserve.export.export_errors import UsageError
from halfserve.export.module_pipeline import export_module
from halfserve.export.onnx_files.model_file import open_model
from tests.export import models
from tests.export.cli.commands import passed
from tests.export.onnx_fp16.models import normal
from tests.export.stored_models import in_one_file, parse

BFLOAT16 = onnx.TensorProto.BFLOAT16
Run = Callable[..., Result]
# One product of large sums, and a difference of them: 8 bits are too few for c and y.
CANCELLING = """g (float[n,8] x) => (float[n,8] y) { a = MatMul (x, w) b = Add (a, large) c = Mul (b, b) y = Sub (c, square)
    }"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a folder with `in.onnx` (overflows in float16), `hard.onnx` (cancels) and samples for both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    weights: dict[str, Any] = {"up": normal(8, 8) * 1e5, "down": normal(8, 8) * 1e-5}
    in_one_file(
        parse("g (float[n,8] x) => (float[n,8] y) { a = MatMul (x, up) y = MatMul (a, down) }", **weights), tmp_path / "in.onnx"
    )
    numbers: dict[str, Any] = {"w": np.eye(8), "large": np.array(60.0), "square": np.array(3600.0)}
    in_one_file(parse(CANCELLING, **numbers), tmp_path / "hard.onnx")
    np.savez("samples.npz", x=normal(16, 8))
    app = typer.Typer()
    for command in (convert, verify, export):
        app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_file_becomes_a_verified_bfloat16_file(run: Run) -> None:
    made = passed(
        run("convert", "in.onnx", "out.onnx", "--dtype", "bfloat16", "--samples", "samples.npz", "--certificate", "out.json")
    )
    for line in ("bfloat16  2 of the 2 nodes", "bfloat16 compared with float32", "in float32\n", "within budget"):
        assert line in made.stdout
    written = open_model("out.onnx")
    assert {tensor.data_type for tensor in written.proto.graph.initializer} == {BFLOAT16}
    certificate = read_certificate(Path("out.json").read_bytes())
    assert (certificate.passed, certificate.precision, certificate.budget.max_scaled_error) == (True, "bfloat16", 0.04)
    check_embedded("out.onnx", certificate)
    again = passed(run("verify", "in.onnx", "out.onnx", "--samples", "samples.npz", "--json"))
    assert json.loads(again.stdout)["precision"] == "bfloat16"


def test_what_needs_float32_in_bfloat16_is_searched(run: Run) -> None:
    made = passed(run("convert", "hard.onnx", "out.onnx", "--dtype", "bfloat16", "--samples", "samples.npz", "--json"))
    found = json.loads(made.stdout)
    assert found["certificate"]["precision"] == "bfloat16"
    assert found["search"]["passed"]
    assert set() < set(found["search"]["keep_fp32_nodes"]) < {"a", "b", "c", "y"}


def test_a_module_becomes_a_bfloat16_version_at_an_opset_that_has_it(tmp_path: Path) -> None:
    samples = torch.rand(16, 1, 8, 8)
    done = export_module(models.cnn(), samples, tmp_path, "cnn", dtype="bfloat16")
    written = onnx.load(done.path / "model.onnx")
    assert done.certificate.precision == "bfloat16"
    assert {node.op_type: node for node in written.graph.node}["Conv"]
    assert {tensor.data_type for tensor in written.graph.initializer if len(tensor.dims) > 1} >= {BFLOAT16}
    assert [entry.version for entry in written.opset_import if not entry.domain] == [22]
    assert "Conv" not in {node.op_type for node in done.report.kept}
    assert read_certificate((done.path / "certificate.json").read_bytes()).precision == "bfloat16"


def test_a_file_is_proved_in_two_precisions_in_one_run(run: Run) -> None:
    in_one_file(parse("g (float[n,8] x) => (float[n,8] y) { y = MatMul (x, w) }", w=normal(8, 8)), Path("plain.onnx"))
    options = ("--samples", "samples.npz", "--precisions", "float16,bfloat16")
    made = passed(run("convert", "plain.onnx", "out.onnx", "--certificate", "out.json", *options))
    assert "out: float16 compared with float32" in made.stdout
    assert "out: computed in bfloat16, compared with float32" in made.stdout
    assert "warning" not in made.stderr
    certificate = read_certificate(Path("out.json").read_bytes())
    assert (certificate.precision, certificate.passed) == ("float16", True)
    assert certificate.precisions["bfloat16"].passed
    check_embedded("out.onnx", certificate)
    again = passed(run("verify", "plain.onnx", "out.onnx", *options, "--json"))
    assert set(json.loads(again.stdout)["precisions"]) == {"bfloat16"}


def test_a_second_precision_that_fails_is_recorded_and_the_file_is_written(run: Run) -> None:
    options = ("--samples", "samples.npz", "--precisions", "bfloat16")
    made = passed(run("convert", "hard.onnx", "out.onnx", "--certificate", "out.json", *options))
    assert "warning: the model is written in float16 and not proved in bfloat16: output 'y' (rounded): max" in made.stderr
    certificate = read_certificate(Path("out.json").read_bytes())
    assert certificate.passed
    assert list(certificate.not_proved) == ["bfloat16"]
    again = run("verify", "hard.onnx", "out.onnx", "--certificate", "again.json", "--samples", "samples.npz", *options)
    assert isinstance(again.exception, BudgetExceeded)
    assert read_certificate(Path("again.json").read_bytes()).precision == "bfloat16"
    both = run("verify", "hard.onnx", "out.onnx", "--samples", "samples.npz", "--precisions", "bfloat16,float16")
    assert isinstance(both.exception, BudgetExceeded)
    assert str(both.exception).startswith("computed in bfloat16: output 'y'")


def test_a_precision_of_another_name_is_refused(run: Run) -> None:
    made = run("verify", "in.onnx", "in.onnx", "--precisions", "float16,fp8")
    assert isinstance(made.exception, UsageError)
    assert "--precisions float16,fp8: dtype is 'fp8'; expected 'float16' or 'bfloat16'" in str(made.exception)


def test_auto_takes_float16_where_that_passes(run: Run) -> None:
    in_one_file(parse("g (float[n,8] x) => (float[n,8] y) { y = MatMul (x, w) }", w=normal(8, 8)), Path("plain.onnx"))
    made = passed(run("convert", "plain.onnx", "out.onnx", "--dtype", "auto", "--samples", "samples.npz", "--json"))
    found = json.loads(made.stdout)
    assert found["conversion"]["dtype"] == "float16"
    assert found["certificate"]["precision"] == "float16"


def test_auto_takes_bfloat16_where_float16_overflows_and_says_why(run: Run) -> None:
    made = passed(run("convert", "in.onnx", "out.onnx", "--dtype", "auto", "--no-repair", "--samples", "samples.npz", "--json"))
    found = json.loads(made.stdout)
    assert (found["certificate"]["precision"], found["search"]) == ("bfloat16", None)
    (why,) = [note for note in found["certificate"]["notes"] if "float16 alone is over budget" in note]
    assert "NaN or infinite" in why


def test_auto_searches_in_the_nearer_type_where_none_passes(run: Run) -> None:
    limits = ("--max-scaled-error", "0.0005", "--samples", "samples.npz")
    made = passed(run("convert", "hard.onnx", "out.onnx", "--dtype", "auto", *limits, "--json"))
    found = json.loads(made.stdout)
    assert found["conversion"]["dtype"] == "float16"
    assert found["search"]["passed"]
    assert len([note for note in found["certificate"]["notes"] if "alone is over budget" in note]) == 2
    without = run("convert", "hard.onnx", "no.onnx", "--dtype", "auto", *limits, "--no-search")
    assert isinstance(without.exception, BudgetExceeded)
    assert not Path("no.onnx").exists()


def test_auto_without_a_verdict_is_refused(run: Run) -> None:
    made = run("convert", "in.onnx", "out.onnx", "--dtype", "auto", "--no-verify")
    assert isinstance(made.exception, UsageError)
    assert "dtype 'auto' chooses by the verdict" in str(made.exception)
