"""Which operation of a training run ran in which dtype and range: recorded, read, shown as a table and as a picture."""

from __future__ import annotations

from amp_core.recorder.record import Direction, Entry, Magnitudes, Record
from amp_core.recorder.recorder import Recorder
from amp_core.recorder.report import plot, table

__all__ = ["Direction", "Entry", "Magnitudes", "Record", "Recorder", "plot", "table"]
