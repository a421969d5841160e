from __future__ import annotations

import onnx
import pytest
from onnx import helper

from export.errors import ExportError
from export.files.model_checks import no_model, require_sound
from tests.export.onnx_files import sums, with_a_body


def test_sound_models_pass() -> None:
    require_sound(sums(), "m")
    require_sound(with_a_body(), "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("graph", "m is not an ONNX model or is damaged: it has no graph"),
        ("output", "m is not an ONNX model or is damaged: it has no outputs"),
        ("ir_version", r"m has IR version 99; onnx .* knows up to \d+; upgrade onnx"),
        ("old", "m has IR version 2 and opsets .*; expected IR 3 or later and an opset"),
        ("opset", r"m has opset 999; onnx .* knows up to \d+; upgrade onnx"),
        ("no opset", "m has IR version 10 and opsets none; expected"),
        ("foreign opset", "m: node 'add0' is a 'Add', but the model imports no opset of ONNX's own operators"),
        ("operator", r"m: node 'add0' is a 'Adds', which ONNX's opset 20 does not have \(did you mean 'Add'\?\); give"),
        ("later", "m: node 'add0' is a 'Gelu', which ONNX's opset 19 does not have; it came later"),
    ],
)
def test_what_no_tool_could_use_is_refused(change: str, message: str) -> None:
    model = sums()
    match change:
        case "graph":
            model.ClearField("graph")
        case "output":
            del model.graph.output[:]
        case "ir_version":
            model.ir_version = 99
        case "old":
            model.ir_version = 2
        case "opset":
            model.opset_import[0].version = 999
        case "no opset":
            del model.opset_import[:]
        case "foreign opset":
            model.opset_import[0].domain = "com.example"
        case "operator":
            model.graph.node[0].op_type = "Adds"
        case "later":
            model.graph.node[0].op_type, model.opset_import[0].version = "Gelu", 19
    with pytest.raises(ExportError, match=message):
        require_sound(model, "m")


def test_an_unknown_operator_in_a_body_is_found() -> None:
    model = with_a_body()
    model.graph.node[1].attribute[0].g.node[0].op_type = "Nonesuch"
    with pytest.raises(ExportError, match="is a 'Nonesuch', which ONNX's opset 20 does not have"):
        require_sound(model, "m")


def test_operators_of_other_domains_and_own_functions_are_the_users() -> None:
    model = sums()
    model.graph.node[0].domain, model.graph.node[0].op_type = "com.example", "Fancy"
    model.graph.node[1].op_type = "Own"
    body = [helper.make_node("Add", ["a", "b"], ["c"])]
    model.functions.append(helper.make_function("", "Own", ["a", "b"], ["c"], body, list(model.opset_import)))
    require_sound(model, "m")


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (b"version https://git-lfs.github.com", "it is a Git LFS pointer: run `git lfs pull`"),
        (b"PK\x03\x04rest", "it is a zip archive, as PyTorch checkpoints are"),
        (b"<!DOCTYPE html>", "it is a web page"),
        (b"anything", "it breaks off"),
    ],
)
def test_what_it_is_instead_is_guessed(head: bytes, hint: str) -> None:
    assert f"m is not an ONNX model or is damaged: {hint}" in str(no_model("m", head, "it breaks off"))


def test_without_a_guess_the_line_is_short() -> None:
    assert str(no_model("m", b"?")) == "m is not an ONNX model or is damaged"


def test_the_newest_opset_is_known() -> None:
    require_sound(sums(opset=onnx.defs.onnx_opset_version()), "m")
