from __future__ import annotations

import pytest

from tests.export.cli.commands import Outcome, Shell, command


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str]) -> Shell:
    """Runs `halfserve` with these arguments."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        return Outcome(command(*arguments), *capfd.readouterr())

    return run
