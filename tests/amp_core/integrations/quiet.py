"""What Lightning and accelerate say that is no fault of ours: warnings to let pass, loggers to silence."""

from __future__ import annotations

import logging

import pytest

LIGHTNING = [
    # Lightning on torch 2.13: its own use of torch's pytrees.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec. is deprecated:DeprecationWarning"),
    # Advice for speed, where the data is a dozen rows.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Advice to set the logging interval, where there is no logger.
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # The tests train on the CPU on any machine.
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


def silence_loggers() -> None:
    """Keep the banners out of the tests' output."""
    for name in ("lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
