"""Debian's Python for Arm64 Linux on this machine, under qemu's emulator of single programs.

apt fetches both, once, into a cache, with lists and a state of its own: nothing of this machine's packages is read or changed.
The suites differ, as qemu 7.2, which bookworm has, ends in a segmentation fault. QEMU_CPU is qemu's own variable.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfserve-arm64"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = f"""
deb [arch=arm64 signed-by={KEYRING}] http://deb.debian.org/debian bookworm main
deb [arch=amd64 signed-by={KEYRING}] http://deb.debian.org/debian trixie main
"""
PACKAGES = ("python3.11:arm64", "libstdc++6:arm64", "libgomp1:arm64", "qemu-user:amd64")
QEMU = "qemu-aarch64"
PROCESSOR = "QEMU_CPU"  # the variable
PYTHON = """#!/bin/sh
exec {files}/{qemu} -L {files} -0 "$0" {files}/usr/bin/python3.11 "$@"
"""

can_emulate_arm64 = pytest.mark.skipif(
    platform.machine() != "x86_64" or not KEYRING.exists() or not all(map(shutil.which, ("apt-get", "dpkg-deb", "tar"))),
    reason="Arm64 is emulated on x86-64 alone, by programs that apt-get fetches with the keys in debian-archive-keyring",
)


def arm64_python(folder: Path) -> Path:
    """Write a program that is Python 3.11 for Arm64, and that finds itself under its own name: its children are Arm64, too."""
    program = folder / "python3.11"
    program.write_text(PYTHON.format(files=_fetched(), qemu=QEMU))
    program.chmod(0o755)
    return program


def _fetched() -> Path:
    """The root of an Arm64 system that has Python alone, and the emulator. Skips the test where no mirror of Debian answers."""
    files = CACHE / "bookworm"
    if not files.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            fetched = Path(scratch) / "files"
            fetched.mkdir()
            for package in _downloaded(Path(scratch)):
                _unpack(package, fetched)
            if not files.is_dir():  # another run was faster
                fetched.rename(files)
    return files


def _downloaded(folder: Path) -> list[Path]:
    (folder / "sources.list").write_text(SOURCES)
    (folder / "status").touch()
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "amd64",
        "APT::Sandbox::User": "root",
        "Dir::Cache": folder,
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
    }
    apt = ["apt-get", "--quiet", "--yes", *(f"--option={name}={value}" for name, value in options.items())]
    for command in (["update", "--error-on=any"], ["install", "--download-only", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run([*apt, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no mirror of Debian has what emulates Arm64: {done.stderr}")
    return list(folder.glob("archives/*.deb"))


def _unpack(package: Path, into: Path) -> None:
    """Unpack a package; of qemu's forty programs, the one."""
    if not package.name.startswith("qemu-user"):
        subprocess.run(["dpkg-deb", "--extract", package, into], check=True)
        return
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as packed,
    ):
        program = next(member for member in packed if member.name.endswith(f"/{QEMU}"))
        program.name = QEMU
        packed.extract(program, into, filter="data")
        unpacking.terminate()
