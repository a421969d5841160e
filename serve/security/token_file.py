"""The file of tokens: their hashes, who holds them, and what each may do.

    # comment
    alice:sha256$3a7bd3e2360a3d29eea436fcfb7e44c735d117c42d1c1835420b6b9942dd4f1b:infer,metrics
    bob:sha256$...:infer expires=2027-01-31T12:00:00Z model=digits* model=mnist

After the roles there may be attributes: when the token ends, and the models that its holder may use.

A token has 256 random bits, so a plain hash keeps it: there is nothing to guess, and nothing for a slow hash to slow down.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.security.errors import SecurityError
from serve.security.model_rights import ModelRights, model_rights
from serve.security.roles import Role
from serve.security.token_attributes import WORD, read_attributes, write_attributes

PREFIX = "hs_"  # lets people and scanners for leaked secrets see what it is
TOKEN_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
HASH = re.compile(r"sha256\$([0-9a-f]{64})")
EXPECTED = "expected NAME:sha256$HASH:ROLE,ROLE as `halfserve token NAME` prints it"


@dataclass(frozen=True)
class Holder:
    """Who holds a token.

    Attributes:
        name: in metrics and limits; never told to other clients.
        digest: SHA-256 of the token.
        roles: what it may do.
        expires_s: when it ends, in seconds since the epoch; None where it does not.
        rights: the models that it may use; None stands for all.
    """

    name: str
    digest: bytes
    roles: frozenset[Role]
    expires_s: float | None = None
    rights: ModelRights | None = None

    def may(self, role: Role) -> bool:
        """Whether this role is among those held; an administrator has them all."""
        return role in self.roles or Role.ADMIN in self.roles


def new_token(
    name: str, roles: Iterable[Role], *, expires_s: float | None = None, models: Iterable[str] = ()
) -> tuple[str, str]:
    """A token, and its line for the file.

    Args:
        name: of who will hold it.
        roles: what it may do.
        expires_s: when it ends, in seconds since the epoch; None has no end.
        models: names, or patterns of names, that it may use; none stands for all.

    Raises:
        SecurityError: the name, the end or a model cannot stand in the file, or there is no role.
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


def read_tokens(path: Path, known: dict[str, Holder] | None = None) -> list[Holder]:
    """The holders in a file, in its order.

    Args:
        path: of the file.
        known: the lines that were read the last time, which are not taken apart again: a line takes 10 us, and a file may have
            thousands, be changed by one, or be wrong and be read each second. Gets those of this time. None knows none.

    Raises:
        SecurityError: it cannot be read, a line is none, a name or a token comes twice, or there is no token.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise SecurityError(f"token file {path} cannot be read: {error.strerror}; `halfserve token` makes its lines") from None
    except UnicodeDecodeError:
        raise SecurityError(f"token file {path} is no text; {EXPECTED} in each line") from None
    holders = _holders(lines, path, {} if known is None else known)
    if not holders:
        raise SecurityError(f"token file {path} holds no token, so nobody could come in; {EXPECTED}")
    _check_once("name", path, holders, [holder.name for holder in holders])
    _check_once("token", path, holders, [holder.digest for holder in holders])
    return holders


def _holders(lines: list[str], path: Path, known: dict[str, Holder]) -> list[Holder]:
    holders: list[Holder] = []
    before = known.copy()
    known.clear()
    for number, line in enumerate(lines, 1):
        said = line.strip()
        if said and not said.startswith("#"):
            holder = known[said] = before.get(said) or _holder(said, f"token file {path}, line {number}")
            holders.append(holder)
    return holders


def _check_once(what: str, path: Path, holders: list[Holder], values: Sequence[str | bytes]) -> None:
    seen = set[str | bytes]()
    for holder, value in zip(holders, values, strict=True):
        if value in seen:
            raise SecurityError(f"token file {path} has the {what} of {holder.name!r} twice; expected one line for each")
        seen.add(value)


def _holder(line: str, where: str) -> Holder:
    # The line is not quoted: whoever mistook the token for its hash would find the token in a log.
    name, _, rest = line.partition(":")
    hashed, _, rest = rest.partition(":")
    match = HASH.fullmatch(hashed)
    if not NAME.fullmatch(name) or match is None:
        raise SecurityError(f"{where}: is no token; {EXPECTED}")
    words = rest.split()
    count = next((place for place, word in enumerate(words) if "=" in word), len(words))
    roles = frozenset(_role(role.strip(), where) for role in " ".join(words[:count]).split(","))
    try:
        expires_s, rights = read_attributes(words[count:])
    except SecurityError as error:
        raise SecurityError(f"{where}: {error}") from None
    return Holder(name, bytes.fromhex(match[1]), roles, expires_s, rights)


def _role(text: str, where: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        # What is no such word may be anything, a token too.
        shown = f"role {text!r}" if WORD.fullmatch(text) else "a role"
        raise SecurityError(f"{where}: {shown} is not known, expected some of {', '.join(Role)}") from None
