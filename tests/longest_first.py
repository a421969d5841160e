"""The order in which workers begin: the longest tests first, one worker each, so that none waits for another at the end."""

from __future__ import annotations

from itertools import groupby

import pytest


def spread(items: list[pytest.Item], workers: int) -> None:
    """Put what has a time limit of its own at the beginning of the workers' shares, in turn; in place.

    pytest-xdist's `worksteal` gives each worker an equal share of the list, in order; who is done takes from others' ends.

    Args:
        items: in the order of the shuffle, which all else stays in.
        workers: how many processes share them.
    """
    long = sorted((item for item in items if _limit_s(item)), key=_limit_s, reverse=True)
    items[:] = [item for item in items if not _limit_s(item)]
    total = len(items) + len(long)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, (_, together) in enumerate(groupby(long, key=lambda item: item.path)):  # a file's tests share fixtures
        shares[number % workers].extend(together)
    for number, share in enumerate(shares):
        begin = number * total // workers
        items[begin:begin] = share


def _limit_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0
