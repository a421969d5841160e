"""Bearer tokens: the file of their hashes, their holders, what each permits, and when they expire.

    # comment
    alice:sha256$3a7bd3e2360a3d29eea436fcfb7e44c735d117c42d1c1835420b6b9942dd4f1b:infer,metrics
    bob:sha256$...:infer expires=2027-01-31T12:00:00Z model=digits* model=mnist

After the roles there may be attributes: the time when the token expires, and the models that its holder may use. All times are
UTC. A token has 256 random bits, so that a fast hash is enough: a slow one only protects secrets that can be guessed.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.engine.errors import PermissionDeniedError, UnauthenticatedError
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.file_reload import DAY_S, Reloadable, Reminder, ends_in
from halfserve.serve.security.model_rights import NO_MODELS, ModelRights, model_rights
from halfserve.serve.security.security_options import SecurityError

logger = logging.getLogger(__name__)

PREFIX = "hs_"  # lets people and scanners for leaked secrets recognize a token
TOKEN_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
HASH = re.compile(r"sha256\$([0-9a-f]{64})")
EXPIRES, MODEL = "expires", "model"
WORD = re.compile(r"[A-Za-z_ -]{0,20}")  # words that error texts may quote, because no token has this form
DURATION = re.compile(r"([0-9]{1,9})([mhdw])")
UNIT_S = {"m": 60, "h": 3600, "d": DAY_S, "w": 7 * DAY_S}
MAX_QUOTED = 32
OTHERS_CAN_WRITE = 0o022
SOON_S = 7 * DAY_S
MAX_NAMED = 10

EXPECTED_LINE = "expected NAME:sha256$HASH:ROLE,ROLE as `halfserve token` makes it"
EXPECTED_ATTRIBUTE = f"expected {EXPIRES}=TIME or {MODEL}=NAME"
EXPECTED_TIME = (
    "expected a time such as 2027-01-31T12:00:00Z, or a date such as 2027-01-31, whose first moment it stands for; in UTC"
)
# Only halfserve's own gRPC clients have the option; errors over REST leave it out.
TOKEN_OPTION = "; halfserve's commands take it from a file: --token-file FILE"  # noqa: S105  (a text)
NO_TOKEN = f"this server asks for a token; send it in the header 'Authorization: Bearer TOKEN'{TOKEN_OPTION}"
WRONG_TOKEN = "the token is not valid here; it may have been revoked: ask the server's administrator for another"  # noqa: S105  (a text)
CHANGED_TOKEN = "what the token may do has changed; make the call again"  # noqa: S105  (a text)
EXPIRED_TOKEN = "the token has expired; ask the server's administrator for another"  # noqa: S105  (a text)


@dataclass(frozen=True)
class TokenHolder:
    """The holder of a token."""

    name: str  # shown in metrics and used for limits; never sent to clients
    digest: bytes  # SHA-256 of the token
    roles: frozenset[Role]  # roles that the token carries
    expires_s: float | None = None  # expiry in seconds since the epoch; None never expires
    rights: ModelRights | None = None  # the models that the holder may use; None stands for all

    def may(self, role: Role) -> bool:
        return role in self.roles or Role.ADMIN in self.roles


def new_token(
    name: str, roles: Iterable[Role], *, expires_s: float | None = None, models: Iterable[str] = ()
) -> tuple[str, str]:
    """Make a token, and its line for the token file.

    `expires_s` is in seconds since the epoch, None never; no `models`, which are names or patterns of names, stands for all.

    Raises:
        SecurityError: the name, the time or a model cannot stand in the file, or there is no role.
    """
    held = list(dict.fromkeys(roles))
    if not NAME.fullmatch(name):
        raise SecurityError(f"token name {name[:80]!r} is not valid, expected up to 64 of A-Z a-z 0-9 _ . @ -")
    if not held:
        raise SecurityError(f"token {name!r} has no role, expected some of {', '.join(Role)}")
    attributes = write_attributes(expires_s, model_rights(list(models)))
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    line = f"{name}:sha256${hashlib.sha256(token.encode()).hexdigest()}:{','.join(held)}"
    return token, " ".join([line, *attributes])


def read_tokens(path: Path, known: dict[str, TokenHolder] | None = None) -> list[TokenHolder]:
    """Read the holders from a file, in its order.

    The lines in `known`, of the previous read, are replaced by those of this one. They are not parsed again: a line takes 10
    us, and a file of thousands of lines may be read each second.

    Raises:
        SecurityError: the file cannot be read, a line is invalid, a name or a token comes twice, or there is no token.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise SecurityError(f"token file {path} cannot be read: {error.strerror}; `halfserve token` makes its lines") from None
    except UnicodeDecodeError:
        raise SecurityError(f"token file {path} is not UTF-8 text; {EXPECTED_LINE} in each line") from None
    known = {} if known is None else known
    before = known.copy()
    known.clear()
    holders: list[TokenHolder] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            known[line] = before.get(line) or _parse_line(line, f"token file {path}, line {number}")
            holders.append(known[line])
    if not holders:
        raise SecurityError(f"token file {path} holds no token, so that no call could be admitted; {EXPECTED_LINE}")
    _check_unique("name", path, holders, [holder.name for holder in holders])
    _check_unique("token", path, holders, [holder.digest for holder in holders])
    return holders


def _check_unique(what: str, path: Path, holders: list[TokenHolder], values: Sequence[str | bytes]) -> None:
    seen = set[str | bytes]()
    for holder, value in zip(holders, values, strict=True):
        if value in seen:
            raise SecurityError(f"token file {path} has the {what} of {holder.name!r} twice; expected one line for each")
        seen.add(value)


def _parse_line(line: str, where: str) -> TokenHolder:
    # Error texts do not quote the line: a user may have put the token itself in place of its hash.
    name, _, rest = line.partition(":")
    hashed, _, rest = rest.partition(":")
    match = HASH.fullmatch(hashed)
    if not NAME.fullmatch(name) or match is None:
        raise SecurityError(f"{where}: is not a token line; {EXPECTED_LINE}")
    words = rest.split()
    count = next((place for place, word in enumerate(words) if "=" in word), len(words))
    roles = frozenset(_parse_role(role.strip(), where) for role in " ".join(words[:count]).split(","))
    try:
        expires_s, rights = read_attributes(words[count:])
    except SecurityError as error:
        raise SecurityError(f"{where}: {error}") from None
    return TokenHolder(name, bytes.fromhex(match[1]), roles, expires_s, rights)


def _parse_role(text: str, where: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        shown = f"role {text!r}" if WORD.fullmatch(text) else "a role"
        raise SecurityError(f"{where}: {shown} is not known, expected some of {', '.join(Role)}") from None


def write_attributes(expires_s: float | None, rights: ModelRights | None) -> list[str]:
    """Return the attributes as words of a line.

    Raises:
        SecurityError: the time is after the year 9999.
    """
    ends = [] if expires_s is None else [f"{EXPIRES}={write_time(expires_s)}"]
    return ends + [f"{MODEL}={pattern}" for pattern in (() if rights is None else rights.patterns)]


def read_attributes(words: Sequence[str]) -> tuple[float | None, ModelRights | None]:
    """Return the expiry in seconds since the epoch, and the models; None for either that no attribute gives.

    Raises:
        SecurityError: a word is no attribute, or its value is invalid.
    """
    ends: list[float] = []
    patterns: list[str] = []
    for word in words:
        name, has_value, value = word.partition("=")
        if not has_value:
            raise SecurityError(f"a word among the attributes is not one; {EXPECTED_ATTRIBUTE}, without spaces in them")
        if name == EXPIRES:
            ends.append(parse_time(value))
        elif name == MODEL:
            patterns.append(value)
        else:
            shown = f"attribute {name!r}" if WORD.fullmatch(name) else "an attribute"
            raise SecurityError(f"{shown} is not known; {EXPECTED_ATTRIBUTE}")
    if len(ends) > 1:
        raise SecurityError(f"{EXPIRES} is given {len(ends)} times, expected once")
    return (ends[0] if ends else None), model_rights(patterns)


def parse_time(text: str) -> float:
    """Return the seconds since the epoch of an ISO 8601 date or time; in UTC unless it names an offset.

    Raises:
        SecurityError: the text is neither.
    """
    try:
        time = dt.datetime.fromisoformat(text)
        return (time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError):
        shown = repr(text) if len(text) <= MAX_QUOTED else "that"  # a longer text may be a token
        raise SecurityError(f"{shown} is not a time; {EXPECTED_TIME}") from None


def parse_end(text: str, now_s: float) -> float:
    """Return the whole seconds since the epoch of a date, a time, or a duration from now such as "90d": a number with m, h, d
    or w.

    Raises:
        SecurityError: the text is none of these, or the time has passed or is after the year 9999.
    """
    match = DURATION.fullmatch(text)
    try:
        end_s = now_s + int(match[1]) * UNIT_S[match[2]] if match is not None else parse_time(text)
    except SecurityError as error:
        raise SecurityError(f"the end {error}; or a time from now such as 90d, 12h or 30m") from None
    if end_s <= now_s:
        raise SecurityError(f"the end {text[:40]!r} is not in the future, so the token could never be used; {EXPECTED_TIME}")
    write_time(end_s)
    return float(math.ceil(end_s))


def write_time(time_s: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC.

    Raises:
        SecurityError: the year has more than four digits.
    """
    try:
        time = dt.datetime.fromtimestamp(time_s, dt.UTC)
    except (ValueError, OverflowError, OSError):
        raise SecurityError("the end lies beyond the year 9999; leave it out") from None
    return time.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


class Tokens:
    """The tokens of one file, as of its last read. Expiry is checked at each request."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Read the file; `clock` returns the time in seconds since the epoch.

        Raises:
            SecurityError: the file cannot be used.
        """
        self._path = path
        lines: dict[str, TokenHolder] = {}
        self._file = Reloadable(lambda: read_tokens(path, lines), "the previous tokens stay valid", [path])
        self._expiry = TokenExpiry(path, clock)
        self._valid: dict[str, TokenHolder] = {}
        self._by_digest: dict[bytes, TokenHolder] = {}
        self._hides_models = False
        self._take()
        if path.stat().st_mode & OTHERS_CAN_WRITE:
            logger.warning("token file %s can be written by other users, who could let themselves in; chmod 600 it", path)

    @property
    def is_stale(self) -> bool:
        """Whether the file could not be used when it was read last."""
        return self._file.is_stale

    def reload(self, *, again: bool = False) -> bool:
        """Read the file again; see `Reloadable.reload`."""
        if not self._file.reload(again=again):
            return False
        logger.info("token file %s was read again: %d tokens", self._path, len(self._file.value))
        self._take()
        return True

    def admit(self, authorization: bytes | None, role: Role) -> TokenHolder:
        """Return the holder of the token in an `authorization` header.

        Raises:
            UnauthenticatedError: there is no token, or it is unknown or expired.
            PermissionDeniedError: the token does not carry the role.
        """
        token = _token(authorization)
        if token is None:
            raise UnauthenticatedError(NO_TOKEN)
        holder = self._find(token)
        if holder is None:
            raise UnauthenticatedError(WRONG_TOKEN)
        self.check(holder)
        if not holder.may(role):
            raise PermissionDeniedError(f"the token may not do this: it requires the role {role.value!r}")
        return holder

    def check(self, holder: TokenHolder) -> None:
        """Check that a holder who was admitted earlier would be admitted now.

        Raises:
            UnauthenticatedError: the token has been revoked or changed, or has expired.
        """
        valid = self._valid.get(holder.name)
        if valid is not holder:
            is_same = valid is not None and valid.digest == holder.digest
            raise UnauthenticatedError(CHANGED_TOKEN if is_same else WRONG_TOKEN)
        if holder.expires_s is not None and self._expiry.is_over(holder):
            raise UnauthenticatedError(EXPIRED_TOKEN)

    def rights_of(self, authorization: bytes | None) -> ModelRights | None:
        """Return the models that calls which need no token, such as health, may name; None stands for all.

        As long as no token is restricted to some models, the models' names are no secret.
        """
        if not self._hides_models:
            return None
        token = _token(authorization)
        holder = None if token is None else self._find(token)
        return NO_MODELS if holder is None or self._expiry.is_over(holder) else holder.rights

    def rights(self) -> list[ModelRights | None]:
        """Return all distinct rights that callers may have; empty while no token is restricted."""
        return [NO_MODELS, *(holder.rights for holder in self._valid.values())] if self._hides_models else []

    def look_at_clock(self) -> bool:
        """See `TokenExpiry.look`."""
        return self._expiry.look()

    def _take(self) -> None:
        """Take over the holders of the file; an unchanged holder keeps its object, so that `check` can compare by identity."""
        before = self._valid
        self._valid = {}
        for holder in self._file.value:
            old = before.get(holder.name)
            self._valid[holder.name] = old if old is not None and (old is holder or old == holder) else holder
        self._by_digest = {holder.digest: holder for holder in self._valid.values()}
        self._hides_models = any(holder.rights is not None for holder in self._valid.values())
        self._expiry.take(self._valid.values())

    def _find(self, token: bytes) -> TokenHolder | None:
        # The look-up is by hash, so that the time of the comparison reveals nothing about a token.
        return self._by_digest.get(hashlib.sha256(token).digest())


class TokenExpiry:
    """Checks tokens against the machine's clock, and warns of tokens that expire soon.

    A wrong clock does no lasting harm: callers are locked out, or admitted, only until it is corrected.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Begin without tokens; `path`, of the token file, is for warnings, and `clock` returns the seconds since the epoch."""
        self._path = path
        self._clock = clock
        self._reminder = Reminder()
        self._ends: list[tuple[float, str]] = []
        self._over: set[str] = set()
        self._refused: set[str] = set()  # names refused as expired since the last look

    def take(self, holders: Iterable[TokenHolder]) -> None:
        self._ends = sorted((holder.expires_s, holder.name) for holder in holders if holder.expires_s is not None)
        self.look()

    def is_over(self, holder: TokenHolder) -> bool:
        if holder.expires_s is None or self._clock() < holder.expires_s:
            return False
        self._refused.add(holder.name)
        return True

    def look(self) -> bool:
        """Warn of tokens that expire soon; returns whether the set of expired tokens has changed since the last look.

        A token may become valid again when the clock is set back. This counts as a change also between two looks: then a name
        was refused that is not among the expired ones now.
        """
        now_s = self._clock()
        before, self._over = self._over, {name for end_s, name in self._ends if now_s >= end_s}
        refused, self._refused = self._refused, set()
        soon = [(end_s, name) for end_s, name in self._ends if end_s - now_s < SOON_S]
        named = ", ".join(f"{name!r} {ends_in(end_s, now_s)}" for end_s, name in soon[:MAX_NAMED])
        more = f", and {len(soon) - MAX_NAMED} more" if len(soon) > MAX_NAMED else ""
        self._reminder.say(f"token file {self._path}: {named}{more}; `halfserve token` makes new ones" if soon else "")
        return self._over != before or not refused <= self._over


def _token(authorization: bytes | None) -> bytes | None:
    """Return the token of a Bearer header, or the password of a Basic one, which browsers and scrapers can send."""
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
