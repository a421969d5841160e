from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from serve.client.connection.address import checked_balancing, target_of
from serve.client.errors import InvalidRequest


@pytest.mark.parametrize(
    ("address", "uri", "is_local"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8001", True),
        ("localhost:1", "localhost:1", True),
        ("[::1]:8001", "[::1]:8001", True),
        ("models.example:8001", "models.example:8001", False),
        ("10.0.0.1:8001", "10.0.0.1:8001", False),
        ("unix:/run/h.sock", "unix:/run/h.sock", True),
        (["10.0.0.1:1"], "10.0.0.1:1", False),
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2", False),
        (["localhost:1", "127.0.0.2:2"], "ipv4:127.0.0.1:1,127.0.0.2:2", True),
        (["[::1]:1", "[fd00::1]:2"], "ipv6:[::1]:1,[fd00::1]:2", False),
    ],
)
def test_a_target(address: str | Sequence[str], uri: str, is_local: bool) -> None:
    target = target_of(address)
    assert (target.uri, target.is_local) == (uri, is_local)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ([], "must be HOST:PORT, at least one of them"),
        (["a.example:1", "10.0.0.1:1"], "'a.example:1' among several addresses must be IP:PORT; or give one name"),
        (["[::1]:1", "10.0.0.1:1"], "must be all IPv4 or all IPv6, not both"),
        (["10.0.0.1:1", "10.0.0.2"], "must be HOST:PORT, such as 127.0.0.1:8001, not '10.0.0.2'"),
        ("grpc://h:1", "must be HOST:PORT"),
        ("h:²", "must be HOST:PORT"),
        ("::1:8001", r"an IPv6 address stands in brackets, such as \[::1\]:8001, not '::1:8001'"),
        ("\udcff:1", r"the address must be text that UTF-8 can say, not '\\udcff:1'"),
        (["\udcff:1", "h:1"], r"the address must be text that UTF-8 can say, not '\\udcff:1'"),
        ("unix:/\udcff", r"the address must be text that UTF-8 can say, not 'unix:/\\udcff'"),
    ],
)
def test_no_target(address: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        target_of(address)


def test_a_balancing_that_there_is_not() -> None:
    with pytest.raises(InvalidRequest, match="must be one of pick_first, round_robin, not 'random'"):
        checked_balancing("random")  # type: ignore[arg-type]  # (that is the point)
