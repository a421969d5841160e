"""Keeping libraries quiet: their progress notes are not our user's, and what goes wrong comes back as an exception."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHATTERING = ("torch", "torch.__trace", "onnxscript", "onnx_ir")


@contextmanager
def silenced() -> Iterator[None]:
    """Mute the warnings, log records and prints of torch's exporter and of the libraries it uses, in the block."""
    loggers = [logging.getLogger(name) for name in CHATTERING]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
