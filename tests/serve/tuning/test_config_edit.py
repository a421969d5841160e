"""Changes of a config.pbtxt."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.tuning import TuningError
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
instance_group < count: 1 >; metric_tags { key: "a" value: "b" }"""


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_only_changed_fields_are_written_in_another_way() -> None:
    wanted = parsed(TEXT)
    wanted.max_batch_size = 8
    wanted.instance_group[0].count = 2
    wanted.dynamic_batching.max_queue_delay_microseconds = 200
    wanted.parameters["intra_op_thread_count"].string_value = "2"
    del wanted.parameters["halfserve.padding"]
    edit = edited(Path("config.pbtxt"), TEXT, wanted)
    assert parsed(edit.after) == wanted
    assert not edit.loses_comments
    removed = [line for line in edit.diff.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert [line for line in removed if "#" in line] == ["-max_batch_size: 32  # rows"]
    assert "max_batch_size: 8  # rows\n" in edit.after
    for kept in (
        '# of the team\nname: "m" # its "name" { is kept\n',
        "input [ {",
        "# foo\n",
        'metric_tags { key: "a" value: "b" }',
    ):
        assert kept in edit.after


def test_an_equal_configuration_changes_nothing() -> None:
    assert not edited(Path("config.pbtxt"), TEXT, parsed(TEXT)).diff


@pytest.mark.parametrize("before", [None, "", "max_batch_size: 1", "# only this"])
def test_missing_fields_are_added_at_the_end(before: str | None) -> None:
    wanted = parsed((before or "").replace("1", "4") + "\ninstance_group { count: 2 }")
    edit = edited(Path("config.pbtxt"), before, wanted)
    assert parsed(edit.after) == wanted
    assert ("# only" in edit.after) == ("# only" in (before or ""))


def test_a_list_of_which_one_element_changes_loses_its_comments_visibly() -> None:
    before = 'input [ { name: "x" }, # first\n { name: "y" } ]  # both'
    wanted = parsed('input { name: "x" } input { name: "z" }')
    edit = edited(Path("config.pbtxt"), before, wanted)
    assert parsed(edit.after) == wanted
    assert edit.loses_comments or "# both" in edit.after


def test_writing_keeps_every_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    for number, text in enumerate(["max_batch_size: 1\n", "max_batch_size: 2\n"], 1):
        path.write_text(text)
        backup = edited(path, text, ModelConfig(max_batch_size=8)).write()
        assert backup is not None
        assert backup.name == ("config.pbtxt.bak" if number == 1 else "config.pbtxt.bak2")
        assert backup.read_text() == text
        assert parsed(path.read_text()).max_batch_size == 8


def test_a_file_that_was_changed_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_size: 3")
    with pytest.raises(TuningError, match="changed during the tuning; nothing was written"):
        edited(path, "max_batch_size: 1", ModelConfig(max_batch_size=8)).write()
    assert [one.name for one in tmp_path.iterdir()] == ["config.pbtxt"]
    assert path.read_text() == "max_batch_size: 3"
