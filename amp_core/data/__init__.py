"""From data sets to batches on the device, the same ones in every run, with any number of workers, after any interruption."""

from halfserve.amp_core.data.batches import Batches
from halfserve.amp_core.data.data_errors import DataError
from halfserve.amp_core.data.split import until_one_ends
from halfserve.amp_core.data.tar_shards import TarShards, tar_shards

__all__ = ["Batches", "DataError", "TarShards", "tar_shards", "until_one_ends"]
