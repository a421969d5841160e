"""An empty virtual environment for a wheel, in which neither a compiler nor the checkout can be found."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

from deploy.release.archives import HASHES, run
from deploy.release.smoke import Installation


class Environment:
    """A virtual environment with one interpreter."""

    def __init__(self, folder: Path, python: str) -> None:
        """Make the environment with an interpreter, such as "3.11" or a path."""
        self._folder = folder
        run(["uv", "venv", "--quiet", "--no-project", "--python", python, str(folder)])

    @property
    def installation(self) -> Installation:
        """The command, with a PATH that has no compiler, and nothing of the caller's environment that finds the checkout."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        scripts = self._folder / "bin"
        variables = {**kept, "PATH": str(scripts), "CC": "no-compiler-here"}
        return Installation(scripts=scripts, folder=self._folder, variables=variables)

    def install(self, wheel: Path, *extras: str) -> float:
        """Install a wheel and its dependencies with the hashes of hashes.txt; returns the seconds that it took.

        None may have to be built.

        Raises:
            ReleaseError: the installation fails.
        """
        started = time.monotonic()
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        wanted = f"halfserve[{','.join(extras)}] @ {wheel.resolve().as_uri()}#sha256={digest}"
        checked = ["--require-hashes", "--constraint", str(HASHES)]
        command = ["uv", "pip", "install", "--quiet", "--only-binary", ":all:", *checked, "--python", str(self._folder), wanted]
        run(command, folder=self._folder)
        return time.monotonic() - started

    def write_bill(self, path: Path) -> None:
        """Write the bill of materials of what is installed, in CycloneDX's JSON, with the licences.

        Raises:
            ReleaseError: it cannot be made.
        """
        run(
            [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--output-file", str(path.resolve()),
             str(self._folder)]
        )  # fmt: skip
