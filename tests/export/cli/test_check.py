from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.cli.commands import Shell, untrained
from tests.export.dtype_check.pairs import factories

PAIRS = factories.__name__


def test_a_leak_is_shown_with_its_line_and_fix(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = shell("check", f"{PAIRS}:leaking", "--input", "float32[2,4]")
    assert code == 4
    lines = Path(factories.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "start = torch.zeros(len(x), 4)" in text)
    assert f"factories.py:{line}" in out
    assert "start = torch.zeros(len(x), 4)" in out
    assert "new_zeros(x, ...)" in out
    assert "Factory: 1 error" in out
    assert "halfserve check: 1 error" in err


def test_json_is_one_object_and_nothing_else(shell: Shell) -> None:
    done = shell("check", f"{PAIRS}:leaking", "--input", "float32[2,4]", "--json")
    report = done.json
    assert done.code == 4
    assert (report["model"], report["clean"], report["counts"]) == ("Factory", False, {"error": 1, "warning": 0, "note": 0})
    assert report["findings"][0]["fix"] == "new_zeros(x, ...)"


def test_the_type_to_check_is_an_option(shell: Shell) -> None:
    done = shell("check", f"{PAIRS}:leaking", "--input", "float32[2,4]", "--dtype", "bfloat16")
    assert (done.code, "what happens in bfloat16, and the fix" in done.out) == (4, True)


def test_a_clean_model_exits_with_0(shell: Shell) -> None:
    done = shell("check", f"{PAIRS}:mended", "--input", "float32[2,4]")
    assert (done.code, "FactoryMended: no dtype leaks" in done.out) == (0, True)


def test_inputs_come_from_a_data_factory(shell: Shell) -> None:
    assert shell("check", f"{PAIRS}:mended", "--data", "tests.export.models:rows").code == 0
    done = shell("check", "tests.export.models:cnn", "--data", "tests.export.models:images", "--json")
    assert (done.code, done.json["clean"]) == (0, True)


def test_a_checkpoint_brings_its_model_and_data(tmp_path: Path, shell: Shell) -> None:
    untrained(tmp_path / "checkpoint.pt", f"{PAIRS}:leaking", "tests.export.models:rows")
    done = shell("check", tmp_path / "checkpoint.pt")
    assert (done.code, "Factory: 1 error" in done.out) == (4, True)
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    done = shell("check", tmp_path / "broken.pt")
    assert (done.code, "is damaged or no checkpoint" in done.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((f"{PAIRS}:mended",), 'nothing to run the model on; give --input "float32[2,3,32,32]", or --data MODULE:FACTORY'),
        ((f"{PAIRS}:mended", "--input", "float32[2,4]", "--data", "a:b"), "both --input and --data are given"),
        ((f"{PAIRS}:mended", "--input", "float33[2,4]"), "input 'float33[2,4]': expected DTYPE[SIZES], such as"),
        ((f"{PAIRS}:mended", "--input", "float32[2,,4]"), "input 'float32[2,,4]': expected sizes between commas"),
        ((f"{PAIRS}:mended", "--input", "float32[2,5]"), "the model fails in float32 on inputs float32[2, 5]: RuntimeError"),
        ((f"{PAIRS}:mended", "--input", "z=float32[2,4]"), "the model fails in float32 on inputs float32[2, 4]: TypeError"),
        ((f"{PAIRS}:mendet", "--input", "float32[2,4]"), "has no 'mendet'; did you mean 'mended'?"),
        ((f"{PAIRS}:failing", "--input", "float32[2,4]"), "raised KeyError: 'weights' when called without arguments"),
        ((f"{PAIRS}:not_a_module", "--input", "float32[2,4]"), "returned a float; expected a torch.nn.Module"),
        (("nonsense", "--input", "float32[2,4]"), "'nonsense' names no factory; expected MODULE:FACTORY"),
        ((f"{PAIRS}:mended", "--data", f"{PAIRS}:not_a_module"), "expected a pair of torch data sets"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], message: str, shell: Shell) -> None:
    code, out, err = shell("check", *arguments)
    assert code == (2 if message.startswith(("nothing to run", "both --input", "input ")) else 1)
    assert out == ""
    assert err.strip().splitlines()[-1].startswith("halfserve check: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("model", ["run/checkpoint.pt", "run/last", "last.pth"])
def test_a_checkpoint_that_is_not_there_is_said_to_be_missing(model: str, shell: Shell) -> None:
    done = shell("check", model)
    assert done.code == 1
    assert f"there is no checkpoint at {model}; give one that `halfserve train` wrote, or MODULE:FACTORY" in done.err
