"""Errors of `halfserve cluster`."""


class ClusterError(Exception):
    """The cluster cannot be reached or cannot do what was asked; the text is one line with the reason."""
