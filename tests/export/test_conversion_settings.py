"""One settings object goes through conversion, search and verdict: no field is lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import onnx
import pytest
import torch

from halfserve import Budget, convert, convert_file, convert_float_to_float16, export_module, find_fp32_nodes
from halfserve.cli import command_of
from halfserve.export import file_conversion, module_pipeline
from halfserve.export.conversion_settings import (
    ConversionKeywords,
    ConversionSettings,
    ModuleKeywords,
    ModuleSettings,
    PipelineKeywords,
    PipelineSettings,
)
from halfserve.export.export_errors import UsageError
from halfserve.export.onnx_fp16 import convert as onnx_conversion
from halfserve.export.search import smallest_fp32_set, trials
from halfserve.export.verification import verify
from tests.export.search.nets import planted, samples

KEYWORDS: dict[type[ConversionSettings], Any] = {
    ConversionSettings: ConversionKeywords,
    PipelineSettings: PipelineKeywords,
    ModuleSettings: ModuleKeywords,
}


class PassedOnError(Exception):
    """Ends a run where its settings arrived."""


@dataclass
class Arrival:
    """The settings that a function was called with."""

    settings: Any = None

    def __call__(self, *args: Any, **_: Any) -> Any:
        self.settings = next(value for value in args if isinstance(value, ConversionSettings))
        raise PassedOnError


def names_of(group: type[ConversionSettings]) -> list[str]:
    return [field.name for field in fields(group)]


def changed(group: type[ConversionSettings], *, leaving: Collection[str] = ()) -> dict[str, Any]:
    """Return keywords for all fields of a group, each with another value than its default."""
    kinds = get_type_hints(group)
    return {field.name: _another(field, kinds[field.name]) for field in fields(group) if field.name not in leaving}


def _another(field: Field[Any], kind: Any) -> Any:
    if isinstance(field.default, bool):
        return not field.default
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value not in (field.default, "auto"))
    if isinstance(field.default, tuple):
        others = {"precisions": "bfloat16", "keep_fp32_nodes": "Min*", "keep_fp32_ops": "Min"}  # a node is to stay half
        return (others.get(field.name, "*"),)
    return 7


def arrived(monkeypatch: pytest.MonkeyPatch, module: Any, function: str, run: Callable[[], object]) -> Any:
    """Return the settings that `module.function` gets when it is called first."""
    arrival = Arrival()
    monkeypatch.setattr(module, function, arrival)
    with pytest.raises(PassedOnError):
        run()
    return arrival.settings


@pytest.mark.parametrize("group", KEYWORDS, ids=lambda group: group.__name__)
def test_keywords_have_names_and_types_of_the_fields(group: type[ConversionSettings]) -> None:
    assert get_type_hints(KEYWORDS[group]) == get_type_hints(group)


@pytest.mark.parametrize(("command", "group"), [("convert", PipelineSettings), ("export", ModuleSettings)])
def test_each_field_is_an_option_with_its_help(command: str, group: type[ConversionSettings]) -> None:
    shown = {parameter.name: parameter.help for parameter in command_of(command).params}
    hints = get_type_hints(group, include_extras=True)
    offered = {name for name in names_of(group) if hasattr(hints[name], "__metadata__")}
    assert offered <= shown.keys()
    assert all(shown[name] for name in offered)
    assert set(names_of(group)) - offered == ({"repair", "upgrade_opset", "external_data"} if command == "export" else set())


def test_convert_loses_no_field_on_the_way_to_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, given = tmp_path / "in.onnx", changed(PipelineSettings)
    onnx.save(planted(2, {}), source)

    def run() -> object:
        return convert(source, tmp_path / "out.onnx", samples={"x": samples()[0]}, **given)

    expected = PipelineSettings(**given)
    assert arrived(monkeypatch, file_conversion, "staged_conversion", run) == expected
    monkeypatch.undo()
    judged_in = (expected.half.name, *expected.precisions)
    assert arrived(monkeypatch, verify, "certified", run) == replace(expected, precisions=judged_in)


def test_the_search_judges_models_of_the_given_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = changed(PipelineSettings)

    def run() -> object:
        return find_fp32_nodes(planted(2, {}), samples(), budget=Budget(), **given)

    expected = replace(PipelineSettings(**given), upgrade_opset=False)  # the model that is searched has the opset already
    assert arrived(monkeypatch, trials, "convert", run) == expected


def test_a_search_after_a_failed_verdict_gets_the_settings_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = changed(PipelineSettings, leaving={"dtype", "search", "accumulators", "keep_fp32_nodes", "keep_fp32_ops"})
    onnx.save(planted(2, {0: "overflow"}), tmp_path / "in.onnx")

    def run() -> object:
        return convert(tmp_path / "in.onnx", tmp_path / "out.onnx", samples={"x": samples()[0]}, **given)

    assert arrived(monkeypatch, smallest_fp32_set, "search_fp32_nodes", run) == PipelineSettings(**given)


def test_export_module_loses_no_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = changed(ModuleSettings)

    def run() -> object:
        return export_module(torch.nn.Linear(3, 2).eval(), np.ones((4, 3), np.float32), tmp_path, "m", **given)

    assert arrived(monkeypatch, module_pipeline, "convert_verified", run) == ModuleSettings(**given)


@pytest.mark.parametrize("function", [convert_file, convert_float_to_float16])
def test_functions_without_a_verdict_lose_no_field(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, given = tmp_path / "in.onnx", changed(ConversionSettings)
    onnx.save(planted(2, {}), source)
    places = (source, tmp_path / "out.onnx") if function is convert_file else (source,)
    settings = arrived(monkeypatch, onnx_conversion, "convert", lambda: function(*places, **given))
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize("given", [["b", "a", "b"], {"a", "b"}, ("a", "b")])
def test_equal_names_make_equal_settings(given: Collection[str]) -> None:
    assert ConversionSettings(keep_fp32_ops=given) == ConversionSettings(keep_fp32_ops=("a", "b"))
    assert ConversionSettings(keep_io_types="x").keep_io_types == ("x",)


def test_a_wrong_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="--precisions fp8: dtype is 'fp8'"):
        PipelineSettings(precisions="fp8")  # type: ignore[arg-type]  # (the command's text)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (convert, ["in.onnx", "out.onnx"]),
        (convert_file, ["in.onnx", "out.onnx"]),
        (convert_float_to_float16, [planted(1, {})]),
        (partial(find_fp32_nodes, budget=Budget()), [planted(1, {}), samples(2)]),
        (export_module, [torch.nn.Linear(2, 2), torch.rand(4, 2), "models", "m"]),
    ],
)
def test_an_unknown_keyword_is_named_with_the_function_and_the_nearest_one(
    function: Callable[..., object], given: list[Any]
) -> None:
    name = getattr(function, "func", function).__name__
    expected = rf"^{name}\(\) got an unexpected keyword argument 'keep_fp32_node'; did you mean 'keep_fp32_nodes'\?$"
    with pytest.raises(TypeError, match=expected):
        function(*given, keep_fp32_node=["a"])
