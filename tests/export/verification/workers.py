"""Workers that misbehave, for tests of what becomes of them."""

from __future__ import annotations

from pathlib import Path

from export.verification.children import WORKER

PROGRAM = """
import os, signal, sys, threading, runpy
import numpy as np
worker = runpy.run_path({worker!r})
right, load = worker["answer_to"], np.load
{before}

def answer_to(request):
    {deed}
    yield from right(request)

def loading(file, *arguments, **options):
    {on_load}
    return load(file, *arguments, **options)

np.load = loading
worker["serve"].__globals__["answer_to"] = answer_to
channel = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
worker["serve"](channel, sys.argv[1])
"""


def misbehaving_worker(folder: Path, deed: str, *, before: str = "", on_load: str = "") -> Path:
    """A worker that does something else, in Python, before it answers a `request`, or before it loads a `file`."""
    path = folder / "worker.py"
    path.write_text(PROGRAM.format(worker=str(WORKER), deed=deed, before=before, on_load=on_load or "pass"))
    return path
