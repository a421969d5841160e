from __future__ import annotations

import logging
import socket

import pytest

from serve.transports.seldom import MOST, PERIOD_S, Seldom
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.calls import Limited, serves

HTTP_1 = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_the_first_lines_of_a_minute_are_written_and_the_others_counted() -> None:
    lines: list[str] = []
    now_s = [0.0]
    seldom = Seldom(lambda text, *values: lines.append(text % values), clock=lambda: now_s[0])
    for number in range(MOST + 7):
        seldom.say("line %d", number)
    assert lines == [f"line {number}" for number in range(MOST)]
    now_s[0] += PERIOD_S
    seldom.say("another")
    assert lines[MOST:] == ["7 lines like these were left out in the last 60 s", "another"]
    now_s[0] += PERIOD_S
    seldom.say("and one more")
    assert lines[MOST + 2 :] == ["and one more"]


def test_strangers_do_not_fill_the_log(limited: Limited, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server: RunningServer = limited()
    host, _, port = server.address.rpartition(":")
    for _ in range(3 * MOST):
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(HTTP_1)
            while stranger.recv(1000):
                pass
    assert sum("broke HTTP/2" in record.message for record in caplog.records) == MOST
    assert serves(server)
