"""The program that measures object storage, run on little."""

from __future__ import annotations

import re

import pytest

from benchmarks import object_storage

pytestmark = pytest.mark.long


def test_a_poll_of_an_unchanged_repository_is_one_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # restored afterwards
    object_storage.main(mib=1, models=3, rounds=2)
    out = capsys.readouterr().out
    assert re.findall(
        r"^copy 1 MiB|^copy 3 small models: \d+ requests|^poll of 3 unchanged models: 1 request", out, re.MULTILINE
    ) == [
        "copy 1 MiB",
        "copy 3 small models: 11 requests",
        "poll of 3 unchanged models: 1 request",
    ]
