"""Distributes connections evenly over members that accept from the same sockets."""

from __future__ import annotations

from halfserve.serve.supervisor.connection_counts import GONE, ConnectionCounts
from halfserve.serve.transports.listener import ConnectionLimit

SLACK_PART = 16  # a member may have up to 1/16 more connections than another, so that bursts are accepted fast


class SharedConnectionLimit(ConnectionLimit):
    """Limit of one member, which leaves new connections to members with fewer.

    Connections are long-lived: a gRPC client opens one and sends all its calls over it.
    """

    def __init__(self, most: float, reason: str, counts: ConnectionCounts, place: int) -> None:
        super().__init__(most, reason)
        self._counts = counts
        self._place = place
        self._accepts = False

    def begin(self) -> None:
        """Start accepting: other members may now leave connections to this one."""
        self._accepts = True
        self._tell()

    def take(self) -> None:
        super().take()
        self._tell()

    def release(self) -> None:
        super().release()
        self._tell()

    def gives_way(self) -> bool:
        return self.open - self.open // SLACK_PART > self._counts.fewest()

    def close(self) -> None:
        """Leave all further connections to other members."""
        self._accepts = False
        self._tell()

    def _tell(self) -> None:
        self._counts.set(self._place, self.open if self._accepts else GONE)
