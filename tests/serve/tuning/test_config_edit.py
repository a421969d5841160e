"""Changes of a config.pbtxt."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.tuning.config_edit import edited

TEXT = """# of the team
name: "m" # its "name" { is kept
platform: "onnxruntime" '_onnx'
max_batch_size: 32  # rows
input [ { name: "x # { no" data_type: TYPE_FP32 dims: [4] }, { name: 'z' data_type: TYPE_FP32 dims: 4 } ]
dynamic_batching {
  preferred_batch_size: [ 8, 16 ]
}
parameters { key: "halfserve.padding" value { string_value: "x[1]=0" } }
parameters { key: "foo" value { string_value: "bar" } }  # foo
parameters { key: "threads" value { string_value: "1" } }
metric_tags { key: "a" value: "b" }
instance_group < count: 1 >"""


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "config.pbtxt").write_text(TEXT)
    return tmp_path / "config.pbtxt"


def test_only_changed_fields_are_written_in_another_way(path: Path) -> None:
    wanted = parsed(TEXT)
    wanted.max_batch_size = 8
    wanted.instance_group[0].count = 2
    wanted.dynamic_batching.max_queue_delay_microseconds = 200
    wanted.parameters["threads"].string_value = "2"
    wanted.parameters["new"].string_value = "3"
    del wanted.parameters["halfserve.padding"]
    edit = edited(path, wanted)
    assert parsed(edit.after) == wanted
    removed = [line for line in edit.diff.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert [line for line in removed if "#" in line] == ["-max_batch_size: 32  # rows"]
    for kept in (
        '# of the team\nname: "m" # its "name" { is kept\n',
        'input [ { name: "x # { no"',
        'parameters { key: "foo" value { string_value: "bar" } }  # foo\n',
        'metric_tags { key: "a" value: "b" }\n',
    ):
        assert kept in edit.after


def test_an_equal_configuration_changes_nothing(path: Path) -> None:
    assert not edited(path, parsed(TEXT)).diff


@pytest.mark.parametrize("before", [None, "", "max_batch_size: 1", "# only this"])
def test_missing_fields_are_added_at_the_end(path: Path, before: str | None) -> None:
    path.unlink() if before is None else path.write_text(before)
    wanted = parsed((before or "").replace("1", "4") + "\ninstance_group { count: 2 }")
    edit = edited(path, wanted)
    assert parsed(edit.after) == wanted
    assert ("# only" in edit.after) == ("# only" in (before or ""))


@pytest.mark.parametrize(
    "before",
    [
        'input [ { name: "x" }, # first\n { name: "y" } ]  # both\ninput { name: "a" } # last',
        'platform: "onnx" # a text over lines\n  "runtime"\nmax_batch_size: 1',
        "name: 'a'; max_batch_size: 1 # two fields",
        "max_batch_size: 0 # written, although it is the default",
    ],
)
def test_every_form_of_a_file_becomes_what_is_wanted(path: Path, before: str) -> None:
    path.write_text(before)
    wanted = parsed(before)
    wanted.max_batch_size = 4
    wanted.input.add(name="z")
    assert parsed(edited(path, wanted).after) == wanted


def test_writing_keeps_every_earlier_file(path: Path) -> None:
    for backup, text in {"config.pbtxt.bak": TEXT, "config.pbtxt.bak1": "max_batch_size: 2\n"}.items():
        path.write_text(text)
        assert edited(path, ModelConfig(max_batch_size=8)).write() == path.with_name(backup)
        assert path.with_name(backup).read_text() == text
        assert parsed(path.read_text()) == ModelConfig(max_batch_size=8)
