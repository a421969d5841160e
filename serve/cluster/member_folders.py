"""The folders of the members of one cluster on this machine, and what servers that ended without a last report left in them.

A member's folder is locked as long as its server or its agent lives, so that one without a lock belongs to neither.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from halfserve.serve.cluster.server_process import AgentError
from halfserve.serve.members.lasting_counters import left_figures

logger = logging.getLogger(__name__)

LONGEST = 107 - len("/server.sock")  # bytes of a folder: a Unix socket's path has room for no more


class MemberFolders:
    """Folders of all members of a cluster, of which one is this agent's own.

    Attributes:
        own: the folder that this agent and its server share.
    """

    def __init__(self, folder: Path | None, cluster: str, member: str) -> None:
        """Make the member's folder, and lock it.

        Args:
            folder: of all clusters of this user; None is one in the system's temporary folder.
            cluster: its name.
            member: id of the server.

        Raises:
            AgentError: it cannot be made, or belongs to another user.
        """
        root = folder or Path(tempfile.gettempdir()) / f"halfserve-clusters-{os.getuid()}"
        self._all = root / hashlib.sha256(cluster.encode()).hexdigest()[:16]
        self.own = self._all / member
        if len(os.fsencode(self.own)) > LONGEST:
            raise AgentError(f"{self.own} has no room for a Unix socket's name; set TMPDIR to a shorter path")
        try:
            self._all.mkdir(mode=0o700, parents=True, exist_ok=True)
            for one in (root, self._all):  # a link, or another user's folder, would tell him everything
                if one.is_symlink() or one.stat().st_uid != os.getuid():
                    raise AgentError(f"{one} is not a folder of this user; remove it, or set TMPDIR to another one")
            hidden = self._all / f".{member}"  # with another name until it is locked
            hidden.mkdir(mode=0o700)
            self._held = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._held, fcntl.LOCK_SH)
            hidden.rename(self.own)
        except OSError as error:
            raise AgentError(f"{error.filename or self.own}: {error.strerror}; set TMPDIR to a folder of this user") from None
        self._claimed: dict[str, int] = {}  # descriptors of the locked folders of the dead, by member

    def claim_left(self) -> dict[str, bytes]:
        """The figures of servers that have ended without a last report, by member; no other agent gets them meanwhile."""
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
                found[path.name] = left_figures(path).to_bytes()
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
        """The controller knows what a claimed server has left."""
        shutil.rmtree(self._all / member, ignore_errors=True)
        os.close(self._claimed.pop(member))

    def own_figures(self) -> bytes:
        """What the own server, which has ended, has counted."""
        return left_figures(self.own).to_bytes()

    def close(self, *, keep_own: bool) -> None:
        """Unlock all folders; `keep_own`: leave the own one to another agent, as the controller does not know what it has."""
        if not keep_own:
            shutil.rmtree(self.own, ignore_errors=True)
        for descriptor in (self._held, *self._claimed.values()):
            os.close(descriptor)
        self._claimed.clear()
