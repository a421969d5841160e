"""Which operation of a training run ran in which dtype and range: recorded, read, shown as a table and as a picture."""

from __future__ import annotations

from halfserve.amp_core.recorder.record import Direction, Entry, Magnitudes, Record
from halfserve.amp_core.recorder.recorder import Recorder
from halfserve.amp_core.recorder.report import plot, table

__all__ = ["Direction", "Entry", "Magnitudes", "Record", "Recorder", "plot", "table"]
