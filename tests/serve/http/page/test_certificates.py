from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.http.page.certificates import MAX_BYTES, read, summary

CERTIFICATE = {
    "schema": "halfserve.certificate",
    "passed": True,
    "samples": 7,
    "created_utc": "2026-01-02T03:04:05+00:00",
    "conversion": {"fp16_nodes": 3, "float_nodes": 4},
}


def test_a_certificate_is_read_and_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(CERTIFICATE))
    content = read(path)
    assert content == CERTIFICATE
    assert summary(content) == {
        "passed": True,
        "created": "2026-01-02T03:04:05+00:00",
        "samples": 7,
        "fp16_nodes": 3,
        "float_nodes": 4,
    }


def test_what_it_does_not_say_is_left_open() -> None:
    assert summary({"passed": "yes", "conversion": []}) == {
        "passed": False,
        "created": None,
        "samples": None,
        "fp16_nodes": None,
        "float_nodes": None,
    }


NO_NUMBER = b'{"schema": "halfserve.certificate", "samples": %s}'


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"schema": "other"}', b"\xff", b"[" * 100_000, NO_NUMBER % b"NaN", NO_NUMBER % b"1e999"],
    ids=range(7),
)
def test_what_is_no_certificate_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "certificate.json"
    path.write_bytes(content)
    assert read(path) is None


def test_one_that_is_absent_or_huge_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / "certificate.json") is None
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert read(huge) is None
