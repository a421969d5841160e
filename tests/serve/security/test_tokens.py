"""What a line of the token file may say after the roles."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from halfserve.serve.engine.errors import PermissionDeniedError, UnauthenticatedError
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.file_reload import DAY_S, ends_in
from halfserve.serve.security.model_rights import ModelRights, model_rights
from halfserve.serve.security.security_options import SecurityError
from halfserve.serve.security.token_command import token
from halfserve.serve.security.tokens import (
    NO_TOKEN,
    TokenHolder,
    Tokens,
    new_token,
    parse_end,
    parse_time,
    read_attributes,
    read_tokens,
    write_attributes,
    write_time,
)
from tests.serve.security.guarded import tokens_in, write_tokens

LINE = "a:sha256$" + "0" * 64 + ":infer"
PATTERNS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)
NOW_S = parse_time("2026-11-21T12:00:00Z")
LAST_S = parse_time("9999-12-31T23:59:59Z")


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
        ("# nobody", "holds no token, so that no call could be admitted; expected NAME:sha256"),
        ("alice", "line 1: is not a token line; expected NAME:sha256"),
        (f"{LINE}\nb b:sha256$00:infer", "line 2: is not a token line"),
        ("a:sha256$xyz:infer", "line 1: is not a token line"),
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
    path, known = tmp_path / "tokens", dict[str, TokenHolder]()
    lines = [LINE.replace("a:", f"{name}:", 1).replace("0", digit) for name, digit in (("a", "0"), ("b", "1"), ("c", "2"))]
    path.write_text("\n".join(lines))
    first = read_tokens(path, known)
    path.write_text("\n".join([*lines, "no token"]))
    for _ in range(2):
        with pytest.raises(SecurityError, match="line 4: is not a token line"):
            read_tokens(path, known)
    path.write_text("\n".join(["# two are gone", f"  {lines[2]}", lines[0].replace(":infer", ":admin")]))
    same, other = read_tokens(path, known)
    assert same is first[2]
    assert (other.name, other.roles) == ("a", frozenset({Role.ADMIN})), "what a line says is what counts"
    assert len(known) == 2


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="cannot be read: No such file or directory; `halfserve token` makes its lines"):
        read_tokens(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SecurityError, match="is not UTF-8 text"):
        read_tokens(tmp_path / "binary")


@pytest.mark.parametrize("name", ["", "a:b", "a b", "x" * 65, "ü"])
def test_a_name_that_cannot_stand_in_the_file_is_refused(name: str) -> None:
    with pytest.raises(SecurityError, match="is not valid, expected up to 64 of"):
        new_token(name, [Role.INFER])
    with pytest.raises(SecurityError, match="has no role, expected some of"):
        new_token("alice", [])


def test_a_known_token_with_the_role_is_admitted(tmp_path: Path) -> None:
    shown = tokens_in(tmp_path / "tokens", alice=Role.INFER, root=Role.ADMIN)
    tokens = Tokens(tmp_path / "tokens")
    alice = shown["alice"].encode()
    assert tokens.admit(b"Bearer " + alice, Role.INFER).name == "alice"
    assert tokens.admit(b"bearer  " + alice, Role.INFER).name == "alice"
    assert tokens.admit(b"Bearer " + shown["root"].encode(), Role.METRICS).name == "root"
    with pytest.raises(PermissionDeniedError, match="it requires the role 'admin'"):
        tokens.admit(b"Bearer " + alice, Role.ADMIN)


@pytest.mark.parametrize("shown", [None, b"", b"Bearer", b"Bearer ", b"Digest x", b"Basic !", b"Basic eA=="])
def test_a_missing_token_is_distinguished_from_a_wrong_one(tmp_path: Path, shown: bytes | None) -> None:
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    tokens = Tokens(tmp_path / "tokens")
    with pytest.raises(
        UnauthenticatedError,
        match=NO_TOKEN,
    ):
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
    assert "line 1: is not a token line" in caplog.text
    assert "the previous tokens stay valid" in caplog.text
    tokens.check(holder)
    tokens_in(path, alice=Role.INFER)
    assert tokens.reload()
    assert not tokens.reload()
    with pytest.raises(UnauthenticatedError, match="it may have been revoked"):
        tokens.check(holder)


def test_changed_rights_require_a_new_call(tmp_path: Path) -> None:
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


@given(st.none() | st.integers(0, 2**37), st.lists(PATTERNS, max_size=4))
def test_attributes_are_read_as_they_were_written(expires_s: int | None, models: list[str]) -> None:
    rights = model_rights(models)
    assert read_attributes(write_attributes(expires_s, rights)) == (expires_s, rights)


def test_a_line_with_attributes_is_a_token(tmp_path: Path) -> None:
    end_s = parse_time("2027-01-31T12:00:00Z")
    _, line = new_token("a", [Role.INFER, Role.METRICS], expires_s=end_s, models=["mnist", "digits*", "mnist"])
    assert line.endswith(":infer,metrics expires=2027-01-31T12:00:00Z model=digits* model=mnist")
    (tmp_path / "tokens").write_text(line)
    (holder,) = read_tokens(tmp_path / "tokens")
    assert (holder.expires_s, holder.rights) == (end_s, ModelRights(("digits*", "mnist")))


def test_files_from_before_there_were_attributes_are_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# ours\n\n  {LINE} , metrics,admin  \n")
    (holder,) = read_tokens(tmp_path / "tokens")
    assert holder.roles == {Role.INFER, Role.METRICS, Role.ADMIN}
    assert (holder.expires_s, holder.rights) == (None, None)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ("expire=2027-01-31", "attribute 'expire' is not known; expected expires=TIME or model=NAME"),
        ("expires=2027-13-31", "'2027-13-31' is not a time; expected a time such as 2027-01-31T12:00:00Z, or a date"),
        ("expires=90d", "'90d' is not a time"),
        ("expires=", "'' is not a time"),
        ("expires=2027-01-31 expires=2027-01-31", "expires is given 2 times, expected once"),
        ("model=", "model '' is neither a name nor a pattern; expected up to 255 characters without spaces, such as 'digits*'"),
        ("model=" + "x" * 256, f"model {'x' * 40!r} is neither a name nor a pattern; expected up to 255"),
        ("model=a b", "a word among the attributes is not one; expected expires=TIME or model=NAME, without spaces in them"),
        ("metrics", "role 'infer metrics' is not known"),
        ("Model=a", "attribute 'Model' is not known"),
    ],
    ids=["unknown", "no-date", "duration", "empty-end", "two-ends", "empty-model", "long", "space", "no-comma", "case"],
)
def test_an_invalid_attribute_names_its_line(tmp_path: Path, attributes: str, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\n{LINE} {attributes}\n")
    with pytest.raises(SecurityError) as refused:
        read_tokens(path)
    assert str(refused.value).startswith(f"token file {path}, line 2: {text}")


def test_a_token_that_stands_in_a_line_is_not_repeated(tmp_path: Path) -> None:
    token, _ = new_token("a", [Role.INFER])
    attributes = (token, f",{token}", f"expires={token}", f"{token}=", f"model=a {token}")
    for line in (f"alice:{token}:infer", *(f"{LINE} {more}" for more in attributes)):
        (tmp_path / "tokens").write_text(line)
        with pytest.raises(SecurityError) as refused:
            read_tokens(tmp_path / "tokens")
        assert token[:20] not in str(refused.value)


def test_a_mistake_at_a_reload_keeps_ends_and_rights_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    (alice,) = write_tokens(path, new_token("alice", [Role.INFER], models=["digits"]))
    tokens = Tokens(path)
    caplog.set_level(logging.ERROR)
    path.write_text(path.read_text().replace("model=digits", "modle=digits"))
    assert not tokens.reload()
    assert "line 1: attribute 'modle' is not known" in caplog.text
    assert "the previous tokens stay valid" in caplog.text
    assert tokens.admit(f"Bearer {alice}".encode(), Role.INFER).rights == ModelRights(("digits",))


@pytest.mark.parametrize(
    ("patterns", "name", "allowed"),
    [
        (["digits"], "digits", True),
        (["digits"], "digits2", False),
        (["digits*"], "digits2", True),
        (["digits*"], "my_digits", False),
        (["Digits"], "digits", False),
        (["a?c", "x"], "a c", True),
        (["a[1]"], "a[1]", True),
        (["a[!1]"], "a2", True),
        (["*"], "anything", True),
        (["digits"], "", False),
    ],
)
def test_a_pattern_stands_for_whole_names(patterns: list[str], name: str, allowed: bool) -> None:
    rights = model_rights(patterns)
    assert rights is not None
    assert rights.allow(name) is allowed


@given(st.integers(0, int(LAST_S)))
def test_what_is_written_is_read_again(time_s: int) -> None:
    assert parse_time(write_time(time_s)) == time_s


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("90d", "2027-02-19T12:00:00Z"),
        ("12h", "2026-11-22T00:00:00Z"),
        ("30m", "2026-11-21T12:30:00Z"),
        ("2w", "2026-12-05T12:00:00Z"),
        ("2027-01-31", "2027-01-31T00:00:00Z"),
        ("2027-01-31T10:00", "2027-01-31T10:00:00Z"),
        ("2027-01-31T10:00+02:00", "2027-01-31T08:00:00Z"),
        ("2027-01-31 10:00:00.5Z", "2027-01-31T10:00:01Z"),
    ],
)
def test_an_expiry_is_a_time_or_a_duration_from_now(text: str, end: str) -> None:
    assert write_time(parse_end(text, NOW_S)) == end


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "the end 'soon' is not a time; expected a time such as 2027-01-31T12:00:00Z, or a date"),
        ("soon", "or a time from now such as 90d, 12h or 30m"),
        ("", "the end '' is not a time"),
        ("-5d", "the end '-5d' is not a time"),
        ("1.5d", "the end '1.5d' is not a time"),
        ("2027-02-30", "the end '2027-02-30' is not a time"),
        ("x" * 50, "the end that is not a time"),
        ("0d", "the end '0d' is not in the future, so the token could never be used"),
        ("2026-11-21", "the end '2026-11-21' is not in the future"),
        ("999999999w", "the end lies beyond the year 9999"),
    ],
)
def test_an_end_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(SecurityError) as refused:
        parse_end(text, NOW_S)
    assert said in str(refused.value)


def test_the_text_of_an_expiry_changes_once_a_day() -> None:
    said = [ends_in(NOW_S, NOW_S - before_s) for before_s in (3.5 * DAY_S, 1.2 * DAY_S, 60, 0, -DAY_S)]
    assert said == ["expires in 3 days", "expires in 1 day", "expires within a day", "has expired", "has expired"]


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(token)
    return made


def test_a_token_is_made(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["alice", "--role", "infer", "--role", "metrics"])
    assert done.exit_code == 0
    (tmp_path / "tokens").write_text(done.stderr)
    (holder,) = read_tokens(tmp_path / "tokens")
    assert (holder.name, set(holder.roles)) == ("alice", {Role.INFER, Role.METRICS})
    assert (holder.expires_s, holder.rights) == (None, None)
    (secret,) = done.stdout.splitlines()
    assert hashlib.sha256(secret.encode()).digest() == holder.digest
    assert secret not in done.stderr


def test_lines_are_added_to_a_token_file(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first = CliRunner().invoke(app, ["alice", "--add-to", str(path)])
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip())  # as some editors leave it
    CliRunner().invoke(app, ["bob", "--json", "--add-to", str(path)])
    alice, bob = read_tokens(path)
    assert (alice.name, bob.name) == ("alice", "bob")
    assert hashlib.sha256(first.stdout.strip().encode()).digest() == alice.digest
    before = path.read_bytes()
    again = CliRunner().invoke(app, ["bob", "--add-to", str(path)])
    assert "has a token of 'bob'; remove its line, or choose another name" in str(again.exception)
    assert (again.stdout, path.read_bytes()) == ("", before)


def test_a_token_whose_line_cannot_be_added_is_not_printed(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["alice", "--add-to", str(tmp_path / "none" / "tokens")])
    assert isinstance(done.exception, SecurityError)
    assert "cannot be written: No such file or directory" in str(done.exception)
    assert done.stdout == ""


def test_a_token_that_ends_and_is_for_some_models_is_made(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["alice", "--expires", "90d", "--model", "mnist", "--model", "digits*"])
    (tmp_path / "tokens").write_text(done.stderr)
    (holder,) = read_tokens(tmp_path / "tokens")
    assert holder.rights == ModelRights(("digits*", "mnist"))
    assert holder.expires_s is not None
    assert 89 * DAY_S < holder.expires_s - time.time() <= 90 * DAY_S + 1
    until = done.stderr.removeprefix("# token of alice, until ").partition(";")[0]
    assert parse_time(until) == holder.expires_s


def test_json_is_all_that_is_printed_then(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["alice", "--json", "--expires", "9999-12-31T23:59:59", "--model", "digits"])
    content = json.loads(done.stdout)
    assert (content["name"], content["expires"], content["models"]) == ("alice", "9999-12-31T23:59:59Z", ["digits"])
    assert content["line"].endswith(":infer expires=9999-12-31T23:59:59Z model=digits")
    assert content["token"].startswith("hs_")
    assert done.stderr == ""
    plain = json.loads(CliRunner().invoke(app, ["alice", "--json"]).stdout)
    assert (plain["expires"], plain["models"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a b"], "token name 'a b' is not valid"),
        (["alice", "--expires", "soon"], "the end 'soon' is not a time"),
        (["alice", "--expires", "2020-01-01"], "is not in the future, so the token could never be used"),
        (["alice", "--model", "a b"], "model 'a b' is neither a name nor a pattern"),
    ],
    ids=["name", "no-time", "past", "space"],
)
def test_what_cannot_be_is_refused_and_nothing_printed(app: typer.Typer, arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, SecurityError)
    assert text in str(done.exception)
    assert done.stdout == ""


def test_an_unknown_role_is_wrong_usage(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["alice", "--role", "root"]).exit_code == 2
