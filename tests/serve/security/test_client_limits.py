from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.errors import RateLimitedError
from serve.security.client_limits import Share, Shares, network_of
from serve.security.options import ClientLimits


class Clock:
    """Goes when it is told to."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(
    rate=st.integers(1, 100),
    burst=st.integers(1, 20),
    pauses_s=st.lists(st.floats(0, 0.5), min_size=1, max_size=60),
)
def test_no_pattern_of_requests_gets_more_than_its_share(rate: int, burst: int, pauses_s: list[float]) -> None:
    clock, taken, hints_s = Clock(), 0, list[float]()
    share = Share(ClientLimits(requests_per_s=rate, burst=burst), clock)
    for pause_s in pauses_s:
        clock.now_s += pause_s
        try:
            share.charge()
            taken += 1
        except RateLimitedError as refused:
            hints_s.append(refused.retry_after_s)
    assert all(0 < hint_s <= 1 / rate + 1e-9 for hint_s in hints_s)
    assert taken <= burst + (clock.now_s - 1000.0) * rate + 1e-6


def test_after_the_hint_there_is_a_place_and_not_before() -> None:
    clock = Clock()
    share = Share(ClientLimits(requests_per_s=4), clock)
    for _ in range(4):
        share.charge()
    with pytest.raises(
        RateLimitedError, match=r"this client may send 4 requests a second; send the next in 0\.25 s"
    ) as refused:
        share.charge()
    clock.now_s += refused.value.retry_after_s * 0.9
    with pytest.raises(RateLimitedError):
        share.charge()
    clock.now_s += refused.value.retry_after_s * 0.11
    share.charge()


def test_places_in_progress_are_given_back() -> None:
    share = Share(ClientLimits(max_concurrent=2), Clock())
    share.enter()
    share.enter()
    with pytest.raises(RateLimitedError, match="this client may have 2 requests in progress; wait for one of them"):
        share.enter()
    share.leave()
    share.enter()


def test_memory_is_bounded_and_nobody_gains_by_that() -> None:
    shares = Shares(ClientLimits(requests_per_s=1), Clock(), max_remembered=10)
    connected = shares.of("connected")
    connected.charge()
    for number in range(100):
        shares.of(f"stranger {number}")
    gc.collect()
    assert len(shares) == 11
    assert shares.of("connected") is connected
    with pytest.raises(RateLimitedError):
        shares.of("connected").charge()


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("192.0.2.7:5000", "192.0.2.7"),
        ("[2001:db8:1:2:3:4:5:6]:5000", "2001:db8:1:2::/64"),
        ("[::ffff:192.0.2.7]:5000", "192.0.2.7"),
        ("[fe80::1%eth0]:5000", "fe80::/64"),
        ("2001:db8:1:2:3:4:5:6:5000", "2001:db8:1:2::/64"),
        ("unix:0", "unix"),
        ("", ""),
    ],
)
def test_whom_an_address_counts_as(peer: str, network: str) -> None:
    assert network_of(peer) == network


def test_who_asks_again_is_remembered_for_longer_than_who_asked_later_and_has_gone() -> None:
    shares = Shares(ClientLimits(requests_per_s=1), Clock(), max_remembered=2)
    shares.of("busy").charge()
    for gone in ("one", "two", "three"):
        shares.of(gone)
        with pytest.raises(RateLimitedError):
            shares.of("busy").charge()
