"""Where tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.text import Text

# A terminal takes them for orders: to write over what it shows, to rename its window, to type an answer.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text for a terminal, whoever wrote it."""
    return text.translate(CONTROLS)


class PipedConsole(Console):
    """A console for what servers say, whose reader may go.

    Names and values are printed as they are: rich would take "[/INST]" for markup of its own and ":fire:" for a picture. What a
    terminal would obey is escaped. BrokenPipeError comes out of `print`, where rich would end the program with code 1.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """What rich calls for each text that it is given, those in a table's cells among them."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """What rich calls while it handles the error."""
        raise  # noqa: PLE0704  (the error that is being handled)
