"""Who a caller is, by the token that it shows."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from serve.engine.errors import PermissionDeniedError, UnauthenticatedError
from serve.security.model_rights import NO_MODELS, ModelRights
from serve.security.reloadable import Reloadable
from serve.security.roles import Role
from serve.security.token_ends import TokenEnds
from serve.security.token_file import Holder, read_tokens

logger = logging.getLogger(__name__)

NO_TOKEN = "this server asks for a token; send 'authorization: Bearer <token>'"  # noqa: S105  (a text)
WRONG_TOKEN = "the token is not valid here; it may have been revoked: ask who runs the server for another"  # noqa: S105  (a text)
CHANGED_TOKEN = "what the token may do has changed; make the call again"  # noqa: S105  (a text)
EXPIRED_TOKEN = "the token has expired; ask who runs the server for another"  # noqa: S105  (a text)
OTHERS_CAN_WRITE = 0o022


class Tokens:
    """The tokens of one file, as it was when last read. Whether one has ended is asked at each request."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Read the file.

        Args:
            path: of the file.
            clock: seconds since the epoch.

        Raises:
            SecurityError: it cannot be used.
        """
        self._path = path
        lines: dict[str, Holder] = {}
        self._file = Reloadable(lambda: read_tokens(path, lines), "the tokens that were read before stay valid", [path])
        self._ends = TokenEnds(path, clock)
        self._valid: dict[str, Holder] = {}
        self._by_digest: dict[bytes, Holder] = {}
        self._hides_models = False
        self._take()
        if path.stat().st_mode & OTHERS_CAN_WRITE:
            logger.warning("token file %s can be written by other users, who could let themselves in; chmod 600 it", path)

    @property
    def is_stale(self) -> bool:
        """Whether the file could not be used when it was read last."""
        return self._file.is_stale

    def reload(self, *, again: bool = False) -> bool:
        """Read the file again, and tell whether that changed anything.

        One that cannot be used changes nothing, and is logged; `again`, only where there is something new to say.
        """
        if not self._file.reload(again=again):
            return False
        logger.info("token file %s was read again: %d tokens", self._path, len(self._file.value))
        self._take()
        return True

    def admit(self, authorization: bytes | None, role: Role) -> Holder:
        """The holder of the token in an `authorization` header.

        Raises:
            UnauthenticatedError: there is no token, or it is not valid; that it has expired is told only to who shows it.
            PermissionDeniedError: it does not carry the role.
        """
        token = _token(authorization)
        if token is None:
            raise UnauthenticatedError(NO_TOKEN)
        holder = self._find(token)
        if holder is None:
            raise UnauthenticatedError(WRONG_TOKEN)
        self.check(holder)
        if not holder.may(role):
            raise PermissionDeniedError(f"the token may not do this: it takes the role {role.value!r}, which it does not have")
        return holder

    def check(self, holder: Holder) -> None:
        """Check that a holder who was let in would be let in now.

        Raises:
            UnauthenticatedError: the token has been revoked, may do something else by now, or has expired.
        """
        valid = self._valid.get(holder.name)
        if valid is not holder:
            is_same = valid is not None and valid.digest == holder.digest
            raise UnauthenticatedError(CHANGED_TOKEN if is_same else WRONG_TOKEN)
        if holder.expires_s is not None and self._ends.is_over(holder):
            raise UnauthenticatedError(EXPIRED_TOKEN)

    def rights_of(self, authorization: bytes | None) -> ModelRights | None:
        """The models of which somebody may hear without being let in; None stands for all.

        While no token is limited to some models, their names are no secret.
        """
        if not self._hides_models:
            return None
        token = _token(authorization)
        holder = None if token is None else self._find(token)
        return NO_MODELS if holder is None or self._ends.is_over(holder) else holder.rights

    def rights(self) -> list[ModelRights | None]:
        """All that somebody may have."""
        return [NO_MODELS, *(holder.rights for holder in self._valid.values())] if self._hides_models else []

    def look_at_clock(self) -> bool:
        """Warn of tokens that end soon, and tell whether others have ended than at the last look, or were told so since."""
        return self._ends.look()

    def _take(self) -> None:
        """Who stays the same stays the same object: `check` can do without comparing."""
        before = self._valid
        self._valid = {new.name: _same(before.get(new.name), new) for new in self._file.value}
        self._by_digest = {holder.digest: holder for holder in self._valid.values()}
        self._hides_models = any(holder.rights is not None for holder in self._valid.values())
        self._ends.take(self._valid.values())

    def _find(self, token: bytes) -> Holder | None:
        """By the token's hash: how long it takes tells at most of hashes, of which nobody can choose a part."""
        return self._by_digest.get(hashlib.sha256(token).digest())


def _same(old: Holder | None, new: Holder) -> Holder:
    return old if old is not None and (old is new or old == new) else new


def _token(authorization: bytes | None) -> bytes | None:
    """What a Bearer header shows, or the password of a Basic one: browsers and scrapers can send that."""
    scheme, _, shown = (authorization or b"").strip().partition(b" ")
    shown = shown.strip()
    if scheme.lower() == b"bearer":
        return shown or None
    if scheme.lower() != b"basic":
        return None
    try:
        _, _, password = base64.b64decode(shown, validate=True).partition(b":")
    except binascii.Error:
        return None
    return password or None
