"""The dtype and range of each operation in a training run: recorded, read, and shown as a table and a picture."""

from __future__ import annotations

from halfserve.amp_core.recorder.record import Direction, Magnitudes, Record, RecordEntry
from halfserve.amp_core.recorder.record_report import plot, table
from halfserve.amp_core.recorder.recorder import Recorder

__all__ = ["Direction", "Magnitudes", "Record", "RecordEntry", "Recorder", "plot", "table"]
