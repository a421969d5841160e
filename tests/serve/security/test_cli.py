"""`halfserve token`: what it prints is what a server reads."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from serve.security.cli import token
from serve.security.errors import SecurityError
from serve.security.expiry import DAY_S, parse_time
from serve.security.model_rights import ModelRights
from serve.security.roles import Role
from serve.security.token_file import read_tokens


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(token)
    return made


def test_a_token_is_made(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["alice", "--role", "infer", "--role", "metrics"])
    assert done.exit_code == 0
    (tmp_path / "tokens").write_text(done.stdout)
    (holder,) = read_tokens(tmp_path / "tokens")
    assert (holder.name, set(holder.roles)) == ("alice", {Role.INFER, Role.METRICS})
    assert (holder.expires_s, holder.rights) == (None, None)
    assert done.stderr.startswith("token of alice: hs_")
    secret = done.stderr.split()[-1]
    assert hashlib.sha256(secret.encode()).digest() == holder.digest


def test_a_token_that_ends_and_is_for_some_models_is_made(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["alice", "--expires", "90d", "--model", "mnist", "--model", "digits*"])
    (tmp_path / "tokens").write_text(done.stdout)
    (holder,) = read_tokens(tmp_path / "tokens")
    assert holder.rights == ModelRights(("digits*", "mnist"))
    assert holder.expires_s is not None
    assert 89 * DAY_S < holder.expires_s - time.time() <= 90 * DAY_S + 1
    until = done.stderr.removeprefix("token of alice, until ").partition(": hs_")[0]
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
        (["alice", "--expires", "soon"], "the end 'soon' is no time"),
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


def test_a_role_that_is_none_is_wrong_usage(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["alice", "--role", "root"]).exit_code == 2
