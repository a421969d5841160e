"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


class PipedConsole(Console):
    """A console whose reader may go: BrokenPipeError comes out of `print`, where rich would end the program with code 1."""

    def on_broken_pipe(self) -> None:
        """What rich calls while it handles the error."""
        raise  # noqa: PLE0704  (the error that is being handled)
