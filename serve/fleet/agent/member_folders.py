"""Folders of a cluster's members on this machine, and the counters that servers left there when they ended unexpectedly.

A member's folder stays locked while its server or its agent lives, so an unlocked folder belongs to a dead member.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from halfserve.serve.fleet.agent.server_process import AgentError
from halfserve.serve.fleet.member.cluster_member import SOCKET
from halfserve.serve.fleet.member.kept_counters import left_counters
from halfserve.serve.fleet.member.member_socket import SUFFIX

logger = logging.getLogger(__name__)

LONGEST = 107 - len(f"/{SOCKET}{SUFFIX}")  # most bytes of a folder's path: the path of a Unix socket in it may have 107


class MemberFolders:
    """Folders of all members of a cluster on this machine, among them the agent's own.

    Attributes:
        own: the folder that this agent and its server share.
    """

    def __init__(self, folder: Path | None, cluster: str, member: str) -> None:
        """Make the member's folder, and lock it; `folder` is the root of all clusters of this user, by default a temporary one.

        Raises:
            AgentError: the folder cannot be made, or belongs to another user.
        """
        root = folder or Path(tempfile.gettempdir()) / f"halfserve-clusters-{os.getuid()}"
        self._all = root / hashlib.sha256(cluster.encode()).hexdigest()[:16]
        self.own = self._all / member
        if len(os.fsencode(self.own)) > LONGEST:
            raise AgentError(f"{self.own} has no room for a Unix socket's name; set TMPDIR to a shorter path")
        try:
            self._all.mkdir(mode=0o700, parents=True, exist_ok=True)
            for one in (root, self._all):  # a link or another user's folder would expose the counters
                if one.is_symlink() or one.stat().st_uid != os.getuid():
                    raise AgentError(f"{one} is not a folder of this user; remove it, or set TMPDIR to another one")
            hidden = self._all / f".{member}"  # named differently until it is locked, so that no other agent claims it
            hidden.mkdir(mode=0o700)
            self._held = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._held, fcntl.LOCK_SH)
            hidden.rename(self.own)
        except OSError as error:
            raise AgentError(f"{error.filename or self.own}: {error.strerror}; set TMPDIR to a folder of this user") from None
        self._claimed: dict[str, int] = {}  # descriptors of the locked folders of dead members, by member id

    def claim_left(self) -> dict[str, bytes]:
        """Claim the counters of members that ended without a last report, by member id; other agents cannot claim them."""
        found: dict[str, bytes] = {}
        for path in sorted(self._all.iterdir()):
            if path.name.startswith(".") or path == self.own or path.name in self._claimed:
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # another agent has just removed it
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino != path.stat().st_ino:  # another agent has removed it
                    raise FileNotFoundError(path)
                found[path.name] = left_counters(path, SOCKET).to_bytes()
            except BlockingIOError:  # its server or its agent lives
                os.close(descriptor)
            except (OSError, ValueError) as error:
                os.close(descriptor)
                if path.exists():
                    logger.warning("what a server has left in %s cannot be read: %s", path, error)
            else:
                self._claimed[path.name] = descriptor
        return found

    def forget(self, member: str) -> None:
        """Delete a claimed folder, because the controller has its counters."""
        shutil.rmtree(self._all / member, ignore_errors=True)
        os.close(self._claimed.pop(member))

    def own_counters(self) -> bytes:
        """Serialized counters that the own server, which has ended, left behind."""
        return left_counters(self.own, SOCKET).to_bytes()

    def close(self, *, keep_own: bool) -> None:
        """Unlock all folders; `keep_own` leaves the own one for another agent, as the controller does not have its counters."""
        if not keep_own:
            shutil.rmtree(self.own, ignore_errors=True)
        for descriptor in (self._held, *self._claimed.values()):
            os.close(descriptor)
        self._claimed.clear()
