from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.fleet.member.handover import VARIABLE, Handover, SupervisorPlan
from halfserve.serve.fleet.member.supervisor_link import take_over

DESCRIPTORS = st.integers(0, 2**20)
SOCKETS = st.dictionaries(st.sampled_from(["grpc", "http", "metrics", "admin"]), st.lists(DESCRIPTORS))


@given(st.builds(Handover, SOCKETS, DESCRIPTORS, DESCRIPTORS, st.integers(0), st.integers(1), st.integers(1), st.text()))
def test_a_handover_is_read_as_it_was_written(handover: Handover) -> None:
    assert Handover.from_text(handover.to_text()) == handover


@given(st.builds(SupervisorPlan, SOCKETS, st.none() | st.text(), st.integers(1), st.text()))
def test_a_plan_is_read_as_it_was_written(plan: SupervisorPlan) -> None:
    assert SupervisorPlan.from_text(plan.to_text()) == plan


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        os.close(descriptor)


def test_without_a_supervisor_there_is_nothing() -> None:
    assert take_over({"PATH": "/bin"}) is None


def test_what_was_given_is_not_passed_on(pipe: tuple[int, int]) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    given = listening.fileno(), *pipe
    for descriptor in given:
        os.set_inheritable(descriptor, True)
    environment = {VARIABLE: Handover({"grpc": [listening.detach()]}, *pipe, restarts=3).to_text(), "PATH": "/bin"}
    inherited = take_over(environment)
    assert inherited is not None
    with inherited.sockets["grpc"][0] as taken:
        assert taken.getsockname()[0] == "127.0.0.1"
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        assert not any(map(os.get_inheritable, given))
    assert inherited.restarts == 3
    assert environment == {"PATH": "/bin"}


def test_readiness_is_reported_once() -> None:
    read, write = os.pipe()
    lifeline, held = os.pipe()
    inherited = take_over({VARIABLE: Handover({}, lifeline, write, 0).to_text()})
    assert inherited is not None
    inherited.report_ready()
    inherited.report_ready()
    assert os.read(read, 10) == b"\n"
    assert os.read(read, 10) == b""
    for descriptor in (read, lifeline, held):
        os.close(descriptor)


def test_readiness_is_not_reported_to_an_ended_supervisor() -> None:
    read, write = os.pipe()
    lifeline, held = os.pipe()
    inherited = take_over({VARIABLE: Handover({}, lifeline, write, 0).to_text()})
    assert inherited is not None
    os.close(read)
    inherited.report_ready()
    for descriptor in (lifeline, held):
        os.close(descriptor)


ALONE = '"restarts": 0, "place": 1, "places": 1, "folder": ""}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "{}",
        "[]",
        '{"sockets": {}, "lifeline": null, "ready": 1, ' + ALONE,
        '{"sockets": {}, "lifeline": 999999, "ready": 999999, ' + ALONE,
        '{"sockets": [], "lifeline": 0, "ready": 1, ' + ALONE,
        '{"sockets": {"grpc": ["x"]}, "lifeline": 999999, "ready": 999999, ' + ALONE,
    ],
)
def test_a_variable_that_no_supervisor_has_set_is_refused(text: str) -> None:
    with pytest.raises(FailedPreconditionError, match=f"the environment variable {VARIABLE} is not what a supervisor has set"):
        take_over({VARIABLE: text})
