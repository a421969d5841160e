"""The interpreter of a Python model: the server's own, or that of the environment which the model brings along."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.config.model_config import ENVIRONMENT
from halfserve.serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
ARCHIVES = (".tar.gz", ".tgz", ".tar")
# Variables that lead an interpreter to another one's packages.
OF_ANOTHER = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX", "__PYVENV_LAUNCHER__")


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """How to start Python for a model.

    Attributes:
        command: the program with its arguments.
        home: the environment's folder; None for the server's own interpreter.
    """

    command: tuple[str, ...]
    home: Path | None = None

    def environment(self) -> Mapping[str, str]:
        """Return the process's environment variables."""
        variables = dict(os.environ)
        if self.home is None:
            return variables
        for name in OF_ANOTHER:
            variables.pop(name, None)
        variables["PATH"] = f"{self.home / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
        variables["VIRTUAL_ENV"] = str(self.home)
        libraries = variables.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = f"{self.home / 'lib'}{os.pathsep}{libraries}" if libraries else str(self.home / "lib")
        return variables


def interpreter_for(config: ModelConfig, model: Path) -> Interpreter:
    """Return the interpreter of the model at `<model folder>/<version>/model.py`.

    Raises:
        ModelLoadError: EXECUTION_ENV_PATH is no folder of a venv or conda environment, nor an archive of one.
    """
    asked = config.parameters[ENVIRONMENT].string_value if ENVIRONMENT in config.parameters else ""
    if not asked:
        return Interpreter(command=(sys.executable,))
    folder = model.parent.parent
    path = Path(asked.replace(MODEL_FOLDER, str(folder)))
    path = path if path.is_absolute() else folder / path
    home = _unpacked(path) if path.name.endswith(ARCHIVES) and path.is_file() else path
    program = home / "bin" / "python"
    if not os.access(program, os.X_OK):
        raise ModelLoadError(
            f"{model}: {ENVIRONMENT} is {asked!r}, expected the folder of a venv or conda environment with bin/python in it, "
            "or a .tar.gz of one as conda-pack writes it"
        )
    return Interpreter(command=(str(program),), home=home)


def _unpacked(archive: Path) -> Path:
    """Return the folder with an archive's content, unpacked once per user and content."""
    status = archive.stat()
    key = f"{archive.resolve()}|{status.st_mtime_ns}|{status.st_size}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfserve" / "python-environments"
    target = root / hashlib.sha256(key.encode()).hexdigest()[:24]
    if target.is_dir():
        return target
    aside: str | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = tempfile.mkdtemp(dir=root, prefix=".unpacking-")
        logger.info("unpacking %s", archive)
        with tarfile.open(archive) as tar:
            tar.extractall(aside, filter="tar")
        Path(aside).rename(target)
    except (OSError, tarfile.TarError) as error:
        if not target.is_dir():  # another process may have been faster
            raise ModelLoadError(f"{archive}: cannot be unpacked: {error}") from None
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    return target
