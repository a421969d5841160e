"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


class PipedConsole(Console):
    """A console for what servers say, whose reader may go.

    Names and values are printed as they are: rich would take "[/INST]" for markup of its own and ":fire:" for a picture.
    BrokenPipeError comes out of `print`, where rich would end the program with code 1.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """What rich calls while it handles the error."""
        raise  # noqa: PLE0704  (the error that is being handled)
