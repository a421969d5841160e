"""`halfserve train`, as a user types it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from halfserve import cli
from tests.amp_core.tiny_task import HERE

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def test_json_is_one_object_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--data", f"{HERE}:data", "--out", str(tmp_path), "--epochs", "12", "--device", "cpu", "--json")
    assert run("train", f"{HERE}:model", *options, "--batch-size", "32", "--learning-rate", "0.05") == 0
    out, err = capfd.readouterr()
    summary = json.loads(out)
    assert err == ""
    assert summary.pop("accuracy") > 0.9
    assert summary.pop("evaluation_loss") < 0.5
    assert summary.pop("seconds") > 0
    assert summary == {
        "checkpoint": str(tmp_path / "checkpoint.pt"),
        "epochs": 12,
        "steps": 48,
        "skipped_steps": 0,
        "scale": 65536.0,
        "dtype": "float16",
        "policy": "native",
        "device": "cpu",
        "processes": 1,
    }


def test_people_get_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--data", f"{HERE}:data", "--out", str(tmp_path), "--epochs", "1", "--dtype", "bfloat16", "--policy", "cuda")
    assert run("train", f"{HERE}:model", *options, "--device", "cpu") == 0
    out = capfd.readouterr().out
    assert "% on held-out data after 1 epochs in bfloat16 on cpu" in out
    assert "0 of 2 steps skipped, scale 1" in out


def test_help_shows_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    text = " ".join(capfd.readouterr().out.split())
    assert (
        "Example: halfserve train halfserve.examples.digits.model:model "
        "--data halfserve.examples.digits.data:data --out runs/digits" in text
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            (f"{HERE}:modell",),
            2,
            f"halfserve train: '{HERE}:modell': the module {HERE} has no 'modell'; did you mean 'model'?\n",
        ),
        ((f"{HERE}:model", "--policy", "cuad"), 2, "halfserve train: unknown policy 'cuad' (did you mean 'cuda'?)"),
        ((f"{HERE}:halved",), 1, "is in half precision; build it in float32"),
        (
            (f"{HERE}:model", "--weights", "none.pt"),
            1,
            "halfserve train: there are no weights at none.pt; expected a .safetensors",
        ),
        ((f"{HERE}:model", "--device", "cuda:99"), 1, "halfserve train: device 'cuda:99' cannot be used here"),
        ((f"{HERE}:model", "--dtype", "fp16"), 2, "'fp16' is not one of 'float16', 'bfloat16', 'float32'"),
        ((f"{HERE}:model", "--epochs", "0"), 2, "Invalid value for '--epochs'"),
        ((), 2, "Missing argument"),
    ],
)
def test_bad_input_is_a_line_and_an_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert run("train", *arguments, "--data", f"{HERE}:data", "--out", str(tmp_path)) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "checkpoint.pt").exists()
