from __future__ import annotations

import io

from rich.console import Console

from export.commands.progress import ProgressLines, progress_on


def test_elsewhere_than_on_a_terminal_steps_are_lines_at_least_ten_seconds_apart() -> None:
    file, now = io.StringIO(), [0.0]
    lines = ProgressLines(Console(file=file, width=40), clock=lambda: now[0])
    steps = {
        0: "verifying",
        9: "a",
        10: "b",
        19: "c",
        21: "searching [what]",
        22: "searching: 1",
        31: "searching: 2 " + "x" * 60,
    }
    for seconds, step in steps.items():
        now[0] = float(seconds)
        lines(step)
    assert file.getvalue().splitlines() == ["b", "searching [what]", "searching: 2 " + "x" * 60]


def test_a_terminal_shows_the_step_that_is_being_done() -> None:
    file = io.StringIO()
    with progress_on(Console(file=file, force_terminal=True, width=80)) as progress:
        progress("searching [what]")
    assert "searching [what]" in file.getvalue()
