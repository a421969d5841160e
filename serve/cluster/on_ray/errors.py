"""Errors of `halfserve cluster`."""


class ClusterError(Exception):
    """The cluster cannot be reached, or cannot do it; the text is one line that says why."""
