"""The dtype and range of each operation in a training run: recorded, read, and shown as a table and a picture."""

from __future__ import annotations

from halfserve.amp_core.recorder.record import Direction, Entry, Magnitudes, Record
from halfserve.amp_core.recorder.recorder import Recorder
from halfserve.amp_core.recorder.report import plot, table

__all__ = ["Direction", "Entry", "Magnitudes", "Record", "Recorder", "plot", "table"]
