"""A check of the protocol, and how its run ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a check ends."""

    PASS = "pass"  # noqa: S105  (no password)
    FAIL = "fail"
    NOT_OFFERED = "not offered"


class NotOfferedError(Exception):
    """The server does not offer what the check is about; the text says what."""


class ViolationError(Exception):
    """The server does something else than the protocol says; the text says what was expected and what came."""


@dataclass(frozen=True, kw_only=True)
class ConformanceCheck:
    """One statement of the protocol, and the calls that show whether a server holds it.

    Attributes:
        name: short name, unique in a run, such as "grpc.infer.raw[mlp]".
        clause: the section of the protocol, or the extension, that says so.
        run: makes the calls. Raises NotOfferedError or ViolationError.
    """

    name: str
    clause: str
    run: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The end of one check; `reason` is empty when it passed."""

    name: str
    clause: str
    outcome: Outcome
    reason: str
    seconds: float


def run_check(check: ConformanceCheck) -> CheckResult:
    """Run one check; an error of the connection or of a broken answer is a failure of the server."""
    start = time.monotonic()
    outcome, reason = Outcome.PASS, ""
    try:
        check.run()
    except NotOfferedError as error:
        outcome, reason = Outcome.NOT_OFFERED, str(error)
    except ViolationError as error:
        outcome, reason = Outcome.FAIL, str(error)
    except Exception as error:  # noqa: BLE001  (whatever a server's answer causes is a result)
        outcome, reason = Outcome.FAIL, f"{type(error).__name__}: {error}"
    return CheckResult(
        name=check.name,
        clause=check.clause,
        outcome=outcome,
        reason=" ".join(reason.split()),
        seconds=round(time.monotonic() - start, 4),
    )


def expect(holds: object, expected: str, got: object) -> None:
    """Raise a ViolationError unless the statement holds."""
    if not holds:
        raise ViolationError(f"expected {expected}, got {got}")
