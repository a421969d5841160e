"""The way in of one caller, before an engine that only notes what comes."""

from __future__ import annotations

import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.errors import InferenceError, PermissionDeniedError, RateLimitedError
from halfserve.serve.protocol.inference import Cancel, ManyReplies, Reply
from halfserve.serve.security.client_limits import ClientAllowance, ClientAllowances, GatedInference, network_of
from halfserve.serve.security.security_options import ClientLimits


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
    share = ClientAllowance(ClientLimits(requests_per_s=rate, burst=burst), clock)
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
    share = ClientAllowance(ClientLimits(requests_per_s=4), clock)
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
    share = ClientAllowance(ClientLimits(max_concurrent=2), Clock())
    share.enter()
    share.enter()
    with pytest.raises(RateLimitedError, match="this client may have 2 requests in progress; wait for one of them"):
        share.enter()
    share.leave()
    share.enter()


def test_forgotten_clients_bound_memory_without_evading_their_limit() -> None:
    shares = ClientAllowances(ClientLimits(requests_per_s=1), Clock(), max_remembered=10)
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
def test_an_address_counts_as_its_network(peer: str, network: str) -> None:
    assert network_of(peer) == network


def test_the_least_recent_client_is_forgotten_first() -> None:
    shares = ClientAllowances(ClientLimits(requests_per_s=1), Clock(), max_remembered=2)
    shares.of("busy").charge()
    for gone in ("one", "two", "three"):
        shares.of(gone)
        with pytest.raises(RateLimitedError):
            shares.of("busy").charge()


class Noting:
    """Notes requests, and which were cancelled.

    Attributes:
        replies: of the requests, in order.
        cancelled: their places.
    """

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.cancelled: list[int] = []

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        place = len(self.replies)
        self.replies.append(reply)
        return lambda: self.cancelled.append(place)

    def failed(self, data: bytes, error: Exception) -> None:
        """Nothing."""

    def gone(self, data: bytes) -> None:
        """Nothing."""


def gated(engine: Noting, share: ClientAllowance | None = None, *, may_share: bool = True) -> GatedInference:
    return GatedInference(engine, share=share, check=None, may_share=may_share, count=lambda _: None)


def test_a_place_is_given_back_once_however_a_request_ends() -> None:
    engine, answers = Noting(), list[bytes | InferenceError]()
    caller = gated(engine, ClientAllowance(ClientLimits(max_concurrent=1), time.monotonic))
    answered = caller.infer(b"", None, answers.append)
    engine.replies[0](b"answer")
    answered()  # too late to be of use
    cancelled = caller.infer(b"", None, answers.append)
    with pytest.raises(RateLimitedError, match="1 requests in progress"):
        caller.infer(b"", None, answers.append)
    cancelled()
    assert 1 in engine.cancelled, "the engine is told, too"
    caller.infer(b"", None, answers.append)
    with pytest.raises(RateLimitedError, match="1 requests in progress"):
        caller.infer(b"", None, answers.append)
    assert answers == [b"answer"]


@pytest.mark.parametrize("where", ["first input", "last input", "first output", "last output"])
def test_shared_memory_is_found_wherever_a_request_names_it(where: str) -> None:
    message = ModelInferRequest(model_name="m")
    which, kind = where.split()
    tensors = message.inputs if kind == "input" else message.outputs
    for name in ("a", "b"):
        message.inputs.add(name=name)
        message.outputs.add(name=name)
    engine = Noting()
    caller = gated(engine, may_share=False)
    caller.infer(message.SerializeToString(), None, lambda _: None)
    tensors[0 if which == "first" else 1].parameters["shared_memory_region"].string_param = "theirs"
    with pytest.raises(PermissionDeniedError, match="the token may not use shared memory"):
        caller.infer(message.SerializeToString(), None, lambda _: None)
    assert len(engine.replies) == 1


def test_a_tensor_may_hold_the_parameters_name() -> None:
    engine = Noting()
    message = ModelInferRequest(model_name="m", raw_input_contents=[b"shared_memory_region"])
    message.inputs.add(name="a")
    message.outputs.add(name="b")
    gated(engine, may_share=False).infer(message.SerializeToString(), None, lambda _: None)
    assert len(engine.replies) == 1
