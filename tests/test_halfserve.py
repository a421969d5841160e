"""The one command: what it lists, loads and says when it is used wrongly."""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

import halfserve
from halfserve import cli
from halfserve.compiled_build import build_in_use
from tests.models import save_mlp

ROOT = Path(__file__).parent.parent
MANY_OPTIONS = 12  # for one heading of a help


def run(*arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "halfserve", *arguments]
    changed = {**os.environ, **environment}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=500, check=False, env=changed)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    for name, stage in cli.STAGES.items():
        assert f"  {name} " in done.stdout
        assert stage.help in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    version = run("--version").stdout
    assert version.startswith(f"halfserve {declared}, {build_in_use().name}")
    assert version.endswith(f"; from the checkout {ROOT}\n")


@pytest.mark.parametrize("name", cli.STAGES)
def test_every_command_has_a_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0
    assert f"halfserve {name} " in result.output
    assert "Example" in result.output
    cut = [line for line in result.output.splitlines() if line.endswith("-") and not line.endswith(" -")]
    assert cut == [], "no option is broken at a hyphen"


def test_an_html_page_is_asked_for_in_the_same_way_by_every_command() -> None:
    commands = [cli.command_of(name) for name in ("convert", "export", "verify", "bench")]
    pages = [option for command in commands for option in command.params if "--html" in option.opts]
    assert len(pages) == len(commands)
    assert len({(page.help, page.is_flag, page.default) for page in pages}) == 1


def options_by_heading(name: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for line in CliRunner().invoke(cli.app, [name, "--help"]).output.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            groups[line[:-1]] = found = []
        elif groups and line.startswith("  --"):
            found.append(line.split()[0])
    return groups


@pytest.mark.parametrize("name", ["serve", "bench", "infer", "models", "train", "convert", "verify", "export"])
def test_a_long_help_has_a_heading_for_each_group_of_options(name: str) -> None:
    groups = options_by_heading(name)
    assert list(groups)[:2] == ["Arguments", "Options"]
    shown = [option for options in groups.values() for option in options]
    assert len(shown) == len(set(shown)) > MANY_OPTIONS
    assert max(map(len, groups.values())) <= MANY_OPTIONS


@pytest.mark.parametrize("name", cli.STAGES)
def test_every_command_says_which_errors_are_the_users(name: str) -> None:
    codes = importlib.import_module(cli.STAGES[name].module).EXIT_CODES
    assert codes
    assert all(issubclass(kind, Exception) and 0 < code < 128 for kind, code in codes.items())


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "in.onnx"],
        ["convert", "in.onnx", "out.onnx", "--fp32-twin"],
        ["convert", "in.onnx", "--repository", "models", "--overwrite"],
        ["convert", "in.onnx", "out.onnx", "--no-verify", "--certificate", "c.json"],
        ["convert", "in.onnx", "out.onnx", "--html", "c.html", "--no-verify"],
        ["convert", "in.onnx", "out.onnx", "--min-agreement", "2"],
        ["verify", "in.onnx", "out.onnx", "--dim", "n"],
        pytest.param(["export", "checkpoint.pt", "--repository", "models", "--dynamic", "tokens"], marks=pytest.mark.long),
        pytest.param(["check", "halfserve.examples.digits.model:model"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together_are_wrong_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'"),
        (["triton", "--model-repository=models"], "FLAGS belong behind two dashes: halfserve triton ... -- FLAGS"),
        (["--loud"], "No such option: --loud"),
        (["serve", "--loud"], "No such option: --loud"),
    ],
)
def test_wrong_use_is_no_stack_trace(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "--help" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["serve", "nowhere\x1b[2J"], ["infer", "m", "--input", "x=@nowhere\x1b[2J"]])
def test_an_error_is_no_order_to_the_terminal(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert r"nowhere\x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["token", "--help"]])
def test_output_that_nobody_reads_is_no_failure(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = run(*arguments, stdout=gone)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")  # noqa: PTH110  (no path of ours)
@pytest.mark.parametrize("arguments", [["--help"], ["token", "--help"]])
def test_a_full_disk_is_told_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123  (no path of ours)
        done = run(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr.endswith(": [Errno 28] No space left on device\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_an_error_is_one_line_where_standard_files_are_closed(closed: str) -> None:
    command = shlex.join([sys.executable, "-m", "halfserve", "infer", "m", "--input", "x=-"])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=500, check=False, input=""
    )
    assert done.returncode == 2
    assert done.stderr == "halfserve infer: --input x=-: standard input: as JSON: Expecting value at line 1, column 1\n"


def test_a_result_is_printed_in_encodings_that_lack_some_of_it(tmp_path: Path) -> None:
    model = str(save_mlp(tmp_path / "model.onnx"))
    done = run("verify", model, model, PYTHONIOENCODING="ascii", COLUMNS="20")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout  # where a column is cut off


def test_the_help_says_what_a_command_does_without_docstrings_too() -> None:
    for level in "012":
        done = run("token", "--help", PYTHONOPTIMIZE=level)
        assert (done.returncode, "Make a bearer token" in done.stdout) == (0, True)
        assert ("it is kept nowhere" in done.stdout) == (level < "2")


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = run("train", "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 69
    hint = "in a checkout of halfserve, run: make install EXTRAS=train; in another environment: pip install -e '.[train]'"
    assert done.stderr == f"halfserve train: needs the package 'torch'; {hint}\n"


def test_windows_cannot_serve_which_one_line_says(tmp_path: Path) -> None:
    (tmp_path / "fcntl.py").write_text("raise ModuleNotFoundError(\"No module named 'fcntl'\", name='fcntl')")
    done = run("serve", "model.onnx", PYTHONPATH=str(tmp_path))
    assert done.returncode == 69
    assert done.stderr == "halfserve serve: needs Linux or macOS; on Windows, install halfserve in WSL 2 and run it there\n"


def test_torch_s_threads_do_not_spin_unless_asked_to() -> None:
    lines = [
        "import os",
        "from halfserve import cli",
        "try: cli.main(['--help'])",
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'])",
    ]
    program = "\n".join(lines)
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True, env=environment
        )
        assert done.stdout.endswith(f"{expected}\n")


def test_help_and_wrong_usage_do_not_wait_for_torch() -> None:
    asked = [
        *([name, "--help"] for name in cli.STAGES if name != "train"),
        ["export", "checkpoint.pt", "--repository", "models", "--min-agreement", "2"],
        ["check", "MODULE:FACTORY", "--input", "float32[1]", "--data", "MODULE:FACTORY"],
        ["demo", "--concurrency", "none"],
    ]
    program = f"""
import sys
from halfserve import cli
for arguments in {asked}:
    try: cli.main(arguments)
    except SystemExit: assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", halfserve.__all__)
def test_public_names_are_typed_and_documented(name: str) -> None:
    value = getattr(halfserve, name)
    assert inspect.getdoc(value)
    methods = (
        [method for key, method in vars(value).items() if not key.startswith("_") and callable(method)]
        if inspect.isclass(value)
        else []
    )
    assert all(inspect.getdoc(method) for method in methods)


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import halfserve", {"torch", "onnx", "onnxruntime", "grpc", "numpy"}),
        ("from halfserve import new_zeros, mask_value, inherit_dtype", {"onnx", "onnxruntime", "onnxscript", "onnx_ir"}),
    ],
)
def test_an_import_loads_no_framework_that_it_does_not_need(program: str, absent: set[str]) -> None:
    command = [sys.executable, "-c", f"import sys; {program}; print({absent} & set(sys.modules))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "set()\n"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'halfserve' has no attribute 'autocats'"):
        _ = halfserve.autocats


def test_a_users_own_modules_hide_no_command(own_modules: Path) -> None:
    program = """
import sys
from typer.testing import CliRunner
from halfserve import cli
sys.path.insert(0, "")
for name in cli.STAGES:
    result = CliRunner().invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0, result.output
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=own_modules,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
