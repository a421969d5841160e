"""Outputs that become 0 in float16 are refused, and taken again with what the message says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from typer.testing import CliRunner

from halfserve.export.certificate.certificate import BudgetExceeded, read_certificate
from halfserve.export.cli.convert import convert
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.verification.verify import verify
from tests.export.stored_models import parse

WIDTH = 8


def network(tail: str, dtype: str = "float", **constants: Any) -> onnx.ModelProto:
    """x [n, 8] -> relu(x w), called h -> y [n, 8], by the nodes of the tail."""
    text = f"g (float[n, {WIDTH}] x) => ({dtype}[n, {WIDTH}] y) {{ [product] a = MatMul (x, w) [tanh] h = Tanh (a) {tail} }}"
    return parse(text, ir=10, w=np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 2, **constants)


def twice_divided() -> onnx.ModelProto:
    return network("[one] b = Div (h, c) [two] y = Div (b, c)", c=3e4)


def exponential() -> onnx.ModelProto:
    return network("[shift] b = Sub (h, c) [power] y = Exp (b)", c=21.0)


def one_column() -> onnx.ModelProto:
    """Seven columns of h, and the exponential of the eighth less 21."""
    tail = """[split] good, last = Split <axis = 1> (h, parts) [shift] b = Sub (last, c) [power] small = Exp (b)
        [joined] y = Concat <axis = 1> (good, small)"""
    return network(tail, c=21.0, parts=np.array([WIDTH - 1, 1]))


def tiny() -> onnx.ModelProto:
    return network("[scaled] y = Mul (h, c)", c=1e-9)


def converted(*arguments: str) -> str:
    """What the command says; empty where the model passes."""
    app = typer.Typer()
    app.command()(convert)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, BudgetExceeded), result.exception
    return str(result.exception or "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    np.savez("in.npz", x=rng.normal(size=(32, WIDTH)).astype(np.float32))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "samples"), [(twice_divided, ()), (exponential, ("--samples", "in.npz")), (one_column, ("--samples", "in.npz"))]
)
def test_what_vanishes_is_refused_and_passes_by_the_command_that_the_message_names(
    model: Callable[[], onnx.ModelProto], samples: tuple[str, ...], folder: Path
) -> None:
    onnx.save(model(), "in.onnx")
    message = converted("in.onnx", "out.onnx", "--no-search", *samples)
    assert "0 throughout and up to" in message
    assert not (folder / "out.onnx").exists()
    named = re.search(r"halfserve convert (\S*in\.onnx TARGET\.onnx [^,]*), where --search", message)
    assert named is not None
    assert converted(*shlex.split(named[1].replace("TARGET", "out")), "--no-search", *samples) == ""
    assert open_model(Path("out.onnx")).proto.graph.node


@pytest.mark.long
def test_the_search_keeps_what_vanishes_in_float32(folder: Path) -> None:
    onnx.save(one_column(), "in.onnx")
    assert converted("in.onnx", "out.onnx", "--samples", "in.npz", "--certificate", "out.json") == ""
    certificate = read_certificate((folder / "out.json").read_bytes())
    assert certificate.passed
    assert certificate.conversion is not None
    kept = {node["name"] for node in certificate.conversion["kept"]}
    assert {"power", "joined"} <= kept <= {"shift", "power", "joined"}


@pytest.mark.long
def test_a_float16_output_that_vanishes_passes_as_a_float32_one(folder: Path) -> None:
    onnx.save(tiny(), "in.onnx")
    message = converted("in.onnx", "out.onnx", "--samples", "in.npz", "--float16-io")
    assert re.search(r"halfserve convert \S*in\.onnx TARGET\.onnx --keep-io-types --keep-fp32-nodes scaled", message)
    assert converted("in.onnx", "out.onnx", "--samples", "in.npz", "--keep-io-types", "--keep-fp32-nodes", "scaled") == ""
    half = network("[scaled] s = Mul (h, c) [end] y = Cast <to = 10> (s)", "float16", c=1e-9)
    with pytest.raises(BudgetExceeded, match=r"halfserve convert .*in.onnx TARGET.onnx --keep-io-types"):
        verify(folder / "in.onnx", half, np.load("in.npz")["x"], cuda=False)
