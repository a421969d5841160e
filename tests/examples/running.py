"""Examples run as their users run them: `python -m halfserve.examples.NAME`, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(name: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m halfserve.examples.NAME` there, and wait for it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", f"halfserve.examples.{name}", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
