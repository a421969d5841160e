"""The trials of a version at each load of it: in which order, and where their answers go."""

from __future__ import annotations

from halfserve.serve.trials.batch_invariance_check import check_batch_invariance
from halfserve.serve.trials.padding_check import proved_padding
from halfserve.serve.trials.tried_version import TriedVersion
from halfserve.serve.trials.warm_up import short_sizes, warm_up

QUICK_S = 1.0  # batches of a model whose warm-up takes longer are not short, and need not be measured


def try_out(tried: TriedVersion) -> None:
    """Try out a loaded version, and set on its model what the trials decide; each of them has the whole budget.

    Does it run at all, and what does its first batch of a size take (`warm_up`)? May requests share batches
    (`Model.invariance`)? Which batches are short (`Model.short_s`)? May requests of different lengths be padded
    (`Model.mixed`)?

    Raises:
        ModelLoadError: the model cannot run, or the configuration's padding does not fit it.
    """
    began = tried.clock()
    warm_up(tried)
    check_batch_invariance(tried)
    if tried.clock() - began < QUICK_S:
        tried.model.short_s = short_sizes(tried)
    tried.model.mixed = proved_padding(tried)
