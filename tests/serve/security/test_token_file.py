from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.engine.errors import PermissionDeniedError, UnauthenticatedError
from serve.security.errors import SecurityError
from serve.security.roles import Role
from serve.security.token_file import Holder, new_token, read_tokens
from serve.security.tokens import Tokens
from tests.serve.security.guarded import tokens_in

LINE = "a:sha256$" + "0" * 64 + ":infer"


def test_a_token_and_its_line_fit_each_other(tmp_path: Path) -> None:
    token, line = new_token("alice", [Role.INFER, Role.METRICS, Role.INFER])
    (tmp_path / "tokens").write_text(f"# ours\n\n  {line}  \n")
    (holder,) = read_tokens(tmp_path / "tokens")
    assert (holder.name, set(holder.roles)) == ("alice", {Role.INFER, Role.METRICS})
    assert holder.digest == hashlib.sha256(token.encode()).digest()
    assert token not in line
    assert len(token) >= 43  # 256 bits
    assert new_token("alice", [Role.INFER])[0] != token


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("# nobody", "holds no token, so nobody could come in; expected NAME:sha256"),
        ("alice", "line 1: is no token; expected NAME:sha256"),
        (f"{LINE}\nb b:sha256$00:infer", "line 2: is no token"),
        ("a:sha256$xyz:infer", "line 1: is no token"),
        (LINE + ",root", "line 1: role 'root' is not known, expected some of infer, metrics, shared-memory, admin"),
        (LINE.removesuffix("infer"), "line 1: role '' is not known"),
        (f"{LINE}\n{LINE.replace('0', '1')}", "has the name of 'a' twice"),
        (f"{LINE}\n{LINE.replace('a:', 'b:', 1)}", "has the token of 'b' twice"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(SecurityError) as refused:
        read_tokens(tmp_path / "tokens")
    assert text in str(refused.value)
    assert str(tmp_path / "tokens") in str(refused.value)


def test_lines_that_were_read_before_are_not_taken_apart_again(tmp_path: Path) -> None:
    path, known = tmp_path / "tokens", dict[str, Holder]()
    lines = [LINE.replace("a:", f"{name}:", 1).replace("0", digit) for name, digit in (("a", "0"), ("b", "1"), ("c", "2"))]
    path.write_text("\n".join(lines))
    first = read_tokens(path, known)
    path.write_text("\n".join([*lines, "no token"]))
    for _ in range(2):
        with pytest.raises(SecurityError, match="line 4: is no token"):
            read_tokens(path, known)
    path.write_text("\n".join(["# two are gone", f"  {lines[2]}", lines[0].replace(":infer", ":admin")]))
    same, other = read_tokens(path, known)
    assert same is first[2]
    assert (other.name, other.roles) == ("a", frozenset({Role.ADMIN})), "what a line says is what counts"
    assert len(known) == 2


def test_a_token_that_stands_where_its_hash_belongs_is_not_repeated(tmp_path: Path) -> None:
    token, _ = new_token("alice", [Role.INFER])
    (tmp_path / "tokens").write_text(f"alice:{token}:infer")
    with pytest.raises(SecurityError) as refused:
        read_tokens(tmp_path / "tokens")
    assert token not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="cannot be read: No such file or directory; `halfserve token` makes its lines"):
        read_tokens(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SecurityError, match="is no text"):
        read_tokens(tmp_path / "binary")


@pytest.mark.parametrize("name", ["", "a:b", "a b", "x" * 65, "ü"])
def test_a_name_that_cannot_stand_in_the_file_is_refused(name: str) -> None:
    with pytest.raises(SecurityError, match="is not valid, expected up to 64 of"):
        new_token(name, [Role.INFER])
    with pytest.raises(SecurityError, match="has no role, expected some of"):
        new_token("alice", [])


def test_who_is_let_in(tmp_path: Path) -> None:
    shown = tokens_in(tmp_path / "tokens", alice=Role.INFER, root=Role.ADMIN)
    tokens = Tokens(tmp_path / "tokens")
    alice = shown["alice"].encode()
    assert tokens.admit(b"Bearer " + alice, Role.INFER).name == "alice"
    assert tokens.admit(b"bearer  " + alice, Role.INFER).name == "alice"
    assert tokens.admit(b"Bearer " + shown["root"].encode(), Role.METRICS).name == "root"
    with pytest.raises(PermissionDeniedError, match="it takes the role 'admin', which it does not have"):
        tokens.admit(b"Bearer " + alice, Role.ADMIN)


@pytest.mark.parametrize("shown", [None, b"", b"Bearer", b"Bearer ", b"Digest x", b"Basic !", b"Basic eA=="])
def test_no_token_is_told_from_a_wrong_one(tmp_path: Path, shown: bytes | None) -> None:
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    tokens = Tokens(tmp_path / "tokens")
    with pytest.raises(UnauthenticatedError, match="this server asks for a token; send 'authorization: Bearer <token>'"):
        tokens.admit(shown, Role.INFER)
    for wrong in (b"Bearer x", b"Bearer \xff", b"Basic eDp5"):
        with pytest.raises(UnauthenticatedError, match="the token is not valid here"):
            tokens.admit(wrong, Role.INFER)


def steps_of_a_wrong_token(tokens: Tokens) -> int:
    """Calls within the one that refuses it."""
    steps: list[str] = []

    def step(_frame: Any, event: str, _argument: Any) -> None:
        steps.append(event)

    before = sys.getprofile()
    sys.setprofile(step)
    try:
        with pytest.raises(UnauthenticatedError):
            tokens.admit(b"Bearer x", Role.INFER)
    finally:
        sys.setprofile(before)
    return len(steps)


def test_a_wrong_token_costs_the_same_among_many_as_among_few(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens_in(path, alice=Role.INFER)
    few = steps_of_a_wrong_token(Tokens(path))
    tokens_in(path, **{f"user{number}": Role.INFER for number in range(500)})
    assert steps_of_a_wrong_token(Tokens(path)) == few


def test_a_broken_file_leaves_the_tokens_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    old = tokens_in(path, alice=Role.INFER)["alice"].encode()
    tokens = Tokens(path)
    holder = tokens.admit(b"Bearer " + old, Role.INFER)
    path.write_text("oops")
    assert not tokens.reload()
    assert "line 1: is no token" in caplog.text
    assert "the tokens that were read before stay valid" in caplog.text
    tokens.check(holder)
    tokens_in(path, alice=Role.INFER)
    assert tokens.reload()
    assert not tokens.reload()
    with pytest.raises(UnauthenticatedError, match="it may have been revoked"):
        tokens.check(holder)


def test_who_may_do_something_else_by_now_is_asked_to_come_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    shown = tokens_in(path, alice=Role.INFER, bob=Role.INFER)
    tokens = Tokens(path)
    alice, bob = (tokens.admit(f"Bearer {shown[name]}".encode(), Role.INFER) for name in ("alice", "bob"))
    path.write_text(path.read_text().replace(":infer", ":infer,metrics", 1))
    assert tokens.reload()
    with pytest.raises(UnauthenticatedError, match="what the token may do has changed; make the call again"):
        tokens.check(alice)
    tokens.check(tokens.admit(f"Bearer {shown['alice']}".encode(), Role.METRICS))
    tokens.check(bob)


def test_a_file_that_others_can_write_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    Tokens(tmp_path / "tokens")
    assert not caplog.text
    (tmp_path / "tokens").chmod(0o666)
    Tokens(tmp_path / "tokens")
    assert "can be written by other users" in caplog.text
