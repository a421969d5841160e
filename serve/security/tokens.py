"""Who a caller is, by the token that it shows."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from pathlib import Path

from serve.engine.errors import PermissionDeniedError, UnauthenticatedError
from serve.security.errors import SecurityError
from serve.security.roles import Role
from serve.security.token_file import Holder, read_tokens

logger = logging.getLogger(__name__)

NO_TOKEN = "this server asks for a token; send 'authorization: Bearer <token>'"  # noqa: S105  (a text)
WRONG_TOKEN = "the token is not valid here; it may have been revoked: ask who runs the server for another"  # noqa: S105  (a text)
OTHERS_CAN_WRITE = 0o022


class Tokens:
    """The tokens of one file, as it was when last read."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            SecurityError: it cannot be used.
        """
        self._path = path
        self._holders = read_tokens(path)
        if path.stat().st_mode & OTHERS_CAN_WRITE:
            logger.warning("token file %s can be written by other users, who could let themselves in; chmod 600 it", path)

    def reload(self) -> bool:
        """Read the file again, and tell whether that changed anything.

        One that cannot be used changes nothing, and is logged.
        """
        try:
            holders = read_tokens(self._path)
        except SecurityError as error:
            logger.error("%s; the tokens that were read before stay valid", error)  # noqa: TRY400  (the text says it all)
            return False
        changed = holders != self._holders
        if changed:
            logger.info("token file %s was read again: %d tokens", self._path, len(holders))
        self._holders = holders
        return changed

    def admit(self, authorization: bytes | None, role: Role) -> Holder:
        """The holder of the token in an `authorization` header.

        Raises:
            UnauthenticatedError: there is no token, or it is not valid.
            PermissionDeniedError: it does not carry the role.
        """
        token = _token(authorization)
        if token is None:
            raise UnauthenticatedError(NO_TOKEN)
        holder = self._find(hashlib.sha256(token).digest())
        if holder is None:
            raise UnauthenticatedError(WRONG_TOKEN)
        if not holder.may(role):
            raise PermissionDeniedError(f"the token may not do this: it takes the role {role.value!r}, which it does not have")
        return holder

    def holds(self, holder: Holder) -> bool:
        """Whether a holder that was let in would be let in now."""
        return holder in self._holders

    def _find(self, digest: bytes) -> Holder | None:
        """All are compared, each in constant time: how long it takes tells nothing of them."""
        found: Holder | None = None
        for holder in self._holders:
            if hmac.compare_digest(holder.digest, digest):
                found = holder
        return found


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
