"""Which build of the hot path is made and which one runs, in copies of this checkout."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from halfserve.compiled_build import MODULES, STAMP, SWITCH, build_in_use, checksum, library_of

ROOT = Path(__file__).parent.parent
SUFFIX = EXTENSION_SUFFIXES[0]
COMPILER = shutil.which(str(sysconfig.get_config_var("CC") or "cc").split()[0])
MODULE = "engine.queueing.compute_slots"  # small, and compiled in seconds
SOURCE = "serve/engine/queueing/compute_slots.py"
LIBRARIES = (f"serve/{library_of(MODULE)}{SUFFIX}", SOURCE.replace(".py", SUFFIX))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    changed = {name: value for name, value in os.environ.items() if name != SWITCH} | environment
    return subprocess.run(command, cwd=folder, env=changed, capture_output=True, text=True, timeout=500, check=False)


def compile_in(checkout: Path, *then: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "setup.py", "--quiet", *(then or ("build_ext", "--inplace"))], checkout, **environment)


def build_of(home: Path) -> tuple[str, str]:
    """The build, as `halfserve --version` says and as a module runs, and what was written to standard error."""
    program = f"import halfserve.serve.{MODULE} as m, halfserve.cli; print(m.__file__); halfserve.cli.main(['--version'])"
    done = run([sys.executable, "-c", program], home)
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.splitlines()
    assert Path(file).is_relative_to(home)
    number, _, build = version.partition(", ")
    assert number.startswith("halfserve ")
    assert file.endswith(SUFFIX if build == "compiled" else ".py")
    return build, done.stderr


def libraries(home: Path) -> set[str]:
    return {path.relative_to(home / "halfserve").as_posix() for path in (home / "halfserve" / "serve").rglob(f"*{SUFFIX}")}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what an installation needs, not compiled; one module of it would be."""
    copy = tmp_path / "checkout"
    folders = {"halfserve", *(path.name for path in (ROOT / "halfserve").iterdir() if path.is_symlink())}
    for name in folders:
        ignored = shutil.ignore_patterns("*.so", "*.stamp", "__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "setup.cfg").write_text(f"[build_ext]\nmodules = {MODULE}\n")
    return copy


@pytest.fixture
def compiled(checkout: Path) -> Path:
    """A copy of which one module is compiled."""
    done = compile_in(checkout)
    assert re.search(r"halfserve: the hot path is compiled \(1 modules, \d+ s\)\n$", done.stderr), done.stderr
    assert build_of(checkout) == ("compiled", "")
    return checkout


def test_what_was_built_is_the_list() -> None:
    build = build_in_use()
    if build.name == "plain":
        must_be_there = os.environ.get("CI") and COMPILER and os.environ.get(SWITCH) != "0"
        assert not must_be_there, f"CI tests the compiled build where a compiler is: {build.reason}"
        pytest.skip(f"the sources run here: {build.reason}")
    names = {name.replace(".", "/") for name in (*MODULES, *map(library_of, MODULES))}
    assert libraries(ROOT) == {f"serve/{name}{SUFFIX}" for name in names}
    for name in MODULES:
        assert str(import_module(f"halfserve.serve.{name}").__file__).endswith(SUFFIX)


def test_compiled_classes_have_no_base_whose_memory_they_would_overlay() -> None:
    """mypyc lays a class out as if its base were plain, and writes into what a base written in C keeps there."""
    known = {"ABC", "Protocol", "Exception", "Enum", "StrEnum", "Mapping", "dict"}
    trees = [ast.parse((ROOT / f"halfserve/serve/{name.replace('.', '/')}.py").read_text(encoding="utf-8")) for name in MODULES]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    known |= {node.name for node in classes}
    bases = {ast.unparse(base).partition("[")[0] for node in classes for base in node.bases}
    assert bases - known == set()


def test_without_a_compiled_build_the_sources_run(checkout: Path) -> None:
    assert build_of(checkout) == ("plain: not compiled", "")
    (checkout / "halfserve" / LIBRARIES[1]).write_bytes(b"left by a build that was interrupted")
    assert build_of(checkout) == ("plain: not compiled", "")


def stamped(checkout: Path, *, suffix: str = SUFFIX) -> None:
    """Stamp the checkout as compiled, with libraries that no interpreter can load."""
    for path in LIBRARIES:
        (checkout / "halfserve" / path).write_bytes(b"no library")
    stamp = {
        "suffix": suffix,
        "libraries": dict.fromkeys(LIBRARIES, len(b"no library")),
        "sources": {SOURCE: checksum(str(checkout / "halfserve" / SOURCE))},
    }
    (checkout / "halfserve" / STAMP).write_text(json.dumps(stamp))


def foreign(checkout: Path) -> str:
    stamped(checkout, suffix=".cpython-39-sparc-solaris.so")
    return "it was made for another Python (.cpython-39-sparc-solaris.so)"


def truncated(checkout: Path) -> str:
    stamped(checkout)
    (checkout / "halfserve" / LIBRARIES[1]).write_bytes(b"no")
    return f"{LIBRARIES[1]} is damaged"


def missing(checkout: Path) -> str:
    stamped(checkout)
    (checkout / "halfserve" / LIBRARIES[1]).unlink()
    return (
        f"it cannot be loaded (FileNotFoundError: [Errno 2] No such file or directory: '{checkout}/halfserve/{LIBRARIES[1]}')"
    )


def edited(checkout: Path) -> str:
    stamped(checkout)
    with (checkout / "halfserve" / SOURCE).open("a") as file:
        file.write("# edited\n")
    return f"{SOURCE} has changed since"


def unloadable(checkout: Path) -> str:
    stamped(checkout)
    return "it cannot be loaded (ImportError: "


def no_stamp(checkout: Path) -> str:
    stamped(checkout)
    (checkout / "halfserve" / STAMP).write_text("{")
    return "it cannot be loaded (JSONDecodeError: "


def empty_stamp(checkout: Path) -> str:
    stamped(checkout)
    (checkout / "halfserve" / STAMP).write_text("[]")
    return "it cannot be loaded (TypeError: "


@pytest.mark.parametrize("spoil", [foreign, truncated, missing, edited, unloadable, no_stamp, empty_stamp])
def test_a_build_that_does_not_fit_is_ignored_with_one_line(checkout: Path, spoil: Callable[[Path], str]) -> None:
    reason = spoil(checkout)
    build, stderr = build_of(checkout)
    assert build.startswith(f"plain: {reason}")
    assert stderr.startswith(f"the compiled hot path is not used: {reason}")
    assert stderr.endswith("; to compile it again, run `make compile` in a checkout, or install halfserve again\n")
    assert stderr.count("\n") == 1


@pytest.mark.long
@needs_compiler
def test_a_compiled_module_runs_until_it_does_not_fit(compiled: Path) -> None:
    assert libraries(compiled) == set(LIBRARIES)
    assert run([sys.executable, "-m", "halfserve", "--version"], compiled, **{SWITCH: "0"}).stdout.endswith(
        f", plain: {SWITCH} is 0\n"
    )
    library = compiled / "halfserve" / LIBRARIES[0]
    content = library.read_bytes()
    library.write_bytes(content[: len(content) // 2])
    assert build_of(compiled)[0] == f"plain: {LIBRARIES[0]} is damaged"
    library.write_bytes(content)
    # What a compiled module imports counts too: constants are compiled in.
    (compiled / "halfserve" / "serve" / "engine" / "queueing" / "unrelated.py").write_text("")
    assert build_of(compiled) == ("compiled", "")
    with (compiled / "halfserve" / SOURCE).open("a") as file:
        file.write("EDITED = 1\n")
    assert build_of(compiled)[0] == f"plain: {SOURCE} has changed since"


def no_compiler(folder: Path) -> dict[str, str]:
    return {"CC": "false"}


def compiler_that_dies(folder: Path) -> dict[str, str]:
    """Ends by a signal where it is to link the module, the library having been made."""
    program = folder / "cc"
    program.write_text(f'#!/bin/sh\ncase "$*" in *-shared*compute_slots*) kill -9 $$;; esac\nexec {COMPILER} "$@"\n')
    program.chmod(0o755)
    return {"CC": str(program)}


def no_mypy(folder: Path) -> dict[str, str]:
    (folder / "mypyc.py").write_text("raise ModuleNotFoundError(\"No module named 'mypyc'\")")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (no_mypy, "No module named 'mypyc'"),
        pytest.param(no_compiler, "failed with exit code 1", marks=[pytest.mark.long, needs_compiler]),
        pytest.param(compiler_that_dies, "failed with exit code -9", marks=[pytest.mark.long, needs_compiler]),
    ],
)
def test_a_build_that_fails_leaves_the_sources_and_one_line(
    checkout: Path, tmp_path: Path, fault: Callable[[Path], dict[str, str]], reason: str
) -> None:
    stamped(checkout)  # an earlier build
    done = compile_in(checkout, **fault(tmp_path))
    assert done.returncode == 0
    said = done.stderr.splitlines()[-1]
    assert said.startswith("halfserve: the hot path is not compiled, the sources run instead: ")
    assert said.endswith(reason)
    assert "Traceback" not in done.stderr
    assert libraries(checkout) == set()
    assert not (checkout / "halfserve" / STAMP).exists()
    assert build_of(checkout) == ("plain: not compiled", "")


@pytest.mark.long
@needs_compiler
def test_a_wheel_carries_the_compiled_modules(checkout: Path, tmp_path: Path) -> None:
    done = compile_in(checkout, "bdist_wheel", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    assert libraries(site) == set(LIBRARIES)
    assert (site / "halfserve" / SOURCE).exists()
    assert build_of(site) == ("compiled", "")
