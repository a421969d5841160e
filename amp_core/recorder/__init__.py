"""Which operation of a training run ran in which dtype and range: recorded, read, shown as a table and as a picture."""

from __future__ import annotations

from amp_core.recorder.entry import Direction, Entry
from amp_core.recorder.magnitudes import Magnitudes
from amp_core.recorder.plot import plot
from amp_core.recorder.record import Record
from amp_core.recorder.recorder import Recorder
from amp_core.recorder.table import table

__all__ = ["Direction", "Entry", "Magnitudes", "Record", "Recorder", "plot", "table"]
