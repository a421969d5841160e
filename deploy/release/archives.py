"""The archives of a release: the source archive, a wheel for any platform, and a compiled wheel for each Python at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from halfserve.compiled_build import LIBRARY, STAMP, SWITCH

PURE_TAG = "py3-none-any"
# The hashes of all files of the packages that build, describe and make up a release; `make locks` writes them.
HASHES = Path(__file__).resolve().parents[2] / "hashes.txt"
# What a wheel holds besides its own metadata, and what it must not hold: tests and programs that measure, and local files.
PACKAGE = "halfserve/"
NOT_IN_WHEEL = ("/tests/", "/benchmarks/", "/__pycache__/", ".pyc")
IN_SOURCES = (
    "tests/test_readme.py",
    "Makefile",
    "constraints.txt",
    "hashes.txt",
    "docs/index.md",
    "halfserve/cli.py",
    "serve/server.py",
)


class ReleaseError(Exception):
    """A release cannot be built, or is not what it has to be."""


def build_pure(checkout: Path, into: Path) -> tuple[Path, Path]:
    """Build the source archive, and from it the wheel for any platform.

    Raises:
        ReleaseError: a build fails; the builder's own lines stand above it.
    """
    run(["uv", "build", "--quiet", "--sdist", "--out-dir", str(into), str(checkout)])
    (sources,) = into.glob("*.tar.gz")
    return sources, _built(sources, into, sys.executable, is_pure=True)


def build_compiled(sources: Path, into: Path, python: str) -> Path:
    """Build from a source archive the compiled wheel for an interpreter, with manylinux's tag on Linux.

    Raises:
        ReleaseError: a build fails; the builder's own lines stand above it.
    """
    with tempfile.TemporaryDirectory() as folder:
        wheel = _built(sources, Path(folder), python, is_pure=False)
        if sys.platform != "linux":
            return Path(shutil.move(wheel, into))
        run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, "--only-plat", str(wheel)])
        wheel.unlink()
        return Path(shutil.move(_only_wheel(Path(folder)), into))


def check_description(archives: list[Path]) -> None:
    """Check that an index can show the archives' description.

    Raises:
        ReleaseError: it cannot; the lines above say why.
    """
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)])


def check_contents(archives: list[Path], version: str, checkout: Path) -> None:
    """Check the names and the contents of the archives.

    Raises:
        ReleaseError: an archive lacks something, or holds what does not belong there.
    """
    for path in archives:
        if not path.name.startswith(f"halfserve-{version}"):
            raise ReleaseError(f"{path.name} is not of version {version}, which pyproject.toml names; build again")
        if path.suffix == ".whl":
            _check_wheel(path, checkout)
        else:
            _check_sources(path)


def run(command: list[str], *, variables: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
    """Run a command, of this environment if it has it, with these variables added.

    Raises:
        ReleaseError: it ends with another exit status than 0.
    """
    try:
        own = Path(sys.executable).parent / command[0]
        program = str(own) if own.exists() else command[0]
        subprocess.run([program, *command[1:]], check=True, cwd=folder, env={**os.environ, **(variables or {})})
    except (OSError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"{' '.join(command)}: {error}") from error


def _built(sources: Path, into: Path, python: str, *, is_pure: bool) -> Path:
    checked = ["--require-hashes", "--build-constraint", str(HASHES)]
    command = ["uv", "build", "--quiet", "--wheel", *checked, "--python", python, "--out-dir", str(into), str(sources)]
    run(command, variables={SWITCH: "0" if is_pure else "1"})
    return _only_wheel(into)


def _only_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def _check_wheel(path: Path, checkout: Path) -> None:
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
        texts = {name: packed.read(name) for name in names}
    for name in names:
        if not name.startswith((PACKAGE, "halfserve-")) or any(part in f"/{name}" for part in NOT_IN_WHEEL):
            raise ReleaseError(f"{path.name} holds {name}, which users do not need; expected the package halfserve alone")
    here = str(checkout).encode()
    for name, text in texts.items():
        if here in text:
            raise ReleaseError(f"{path.name}: {name} names the folder {checkout} of this machine")
    is_compiled = any(LIBRARY in name for name in names) and any(name.endswith(STAMP) for name in names)
    if is_compiled is (PURE_TAG in path.name):
        expected = "no compiled modules" if is_compiled else "the compiled modules; the build's own lines say what failed"
        raise ReleaseError(f"{path.name}: expected {expected}")


def _check_sources(path: Path) -> None:
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    for name in IN_SOURCES:
        if name not in names and f"halfserve/{name}" not in names:
            raise ReleaseError(f"{path.name} lacks {name}; a source archive is the whole of the source (MANIFEST.in)")
