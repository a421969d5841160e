from __future__ import annotations

from typing import Any

import pytest

from serve.client.connection.headers import bearer, headers_of
from serve.client.errors import InvalidRequest


def test_names_are_put_into_lower_case() -> None:
    assert headers_of({"X-Tenant": "a b", "trace-bin": b"\0\xff"}) == (("x-tenant", "a b"), ("trace-bin", b"\0\xff"))
    assert headers_of(None) == ()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a b", "v", "expected a name of a-z"),
        ("", "v", "expected a name of a-z"),
        ("grpc-timeout", "1S", "that does not begin with grpc-"),
        ("a", b"v", "bytes need a name that ends in -bin"),
        ("a-bin", "v", "bytes need a name that ends in -bin"),
        ("a", "é", "expected printable ASCII text"),
        ("a", "b\nc", "expected printable ASCII text"),
        ("a", 3, "expected printable ASCII text"),
    ],
)
def test_what_grpc_cannot_send(name: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        headers_of({name: value})


def test_a_token_may_be_renewed() -> None:
    tokens = iter(["one", "two"])
    assert [bearer(lambda: next(tokens)) for _ in range(2)] == [
        (("authorization", "Bearer one"),),
        (("authorization", "Bearer two"),),
    ]


@pytest.mark.parametrize("token", ["", "secret\n", "a b", "é"])
def test_what_is_no_token_is_refused_without_being_told(token: str) -> None:
    with pytest.raises(InvalidRequest, match="must be printable ASCII without spaces") as refused:
        bearer(token)
    assert not token.strip() or token.strip() not in str(refused.value)
