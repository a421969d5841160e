"""What a line of the token file may say after the roles."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.security.errors import SecurityError
from serve.security.expiry import parse_time
from serve.security.model_rights import ModelRights, model_rights
from serve.security.roles import Role
from serve.security.token_attributes import read_attributes, write_attributes
from serve.security.token_file import new_token, read_tokens
from serve.security.tokens import Tokens
from tests.serve.security.guarded import write_tokens

LINE = "a:sha256$" + "0" * 64 + ":infer"
PATTERNS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)


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
        ("expires=2027-13-31", "'2027-13-31' is no time; expected a time such as 2027-01-31T12:00:00Z, or a date"),
        ("expires=90d", "'90d' is no time"),
        ("expires=", "'' is no time"),
        ("expires=2027-01-31 expires=2027-01-31", "expires stands there 2 times; expected it once"),
        ("model=", "model '' is neither a name nor a pattern; expected up to 255 characters without spaces, such as 'digits*'"),
        ("model=" + "x" * 256, f"model {'x' * 40!r} is neither a name nor a pattern; expected up to 255"),
        ("model=a b", "a word among the attributes is none; expected expires=TIME or model=NAME, without spaces in them"),
        ("metrics", "role 'infer metrics' is not known"),
        ("Model=a", "attribute 'Model' is not known"),
    ],
    ids=["unknown", "no-date", "duration", "empty-end", "two-ends", "empty-model", "long", "space", "no-comma", "case"],
)
def test_an_attribute_with_a_mistake_names_its_line_and_lets_nobody_in(tmp_path: Path, attributes: str, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\n{LINE} {attributes}\n")
    with pytest.raises(SecurityError) as refused:
        read_tokens(path)
    assert str(refused.value).startswith(f"token file {path}, line 2: {text}")


def test_a_token_that_stands_among_the_attributes_is_not_repeated(tmp_path: Path) -> None:
    token, _ = new_token("a", [Role.INFER])
    for attributes in (token, f",{token}", f"expires={token}", f"{token}=", f"model=a {token}"):
        (tmp_path / "tokens").write_text(f"{LINE} {attributes}")
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
    assert "the tokens that were read before stay valid" in caplog.text
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
