"""Tables on a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH, WIDE = 80, 1000  # characters


def printed(shown: RenderableType, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(shown, crop=False)
    return file.getvalue()


def broken_words(shown: RenderableType) -> list[str]:
    """What stands in 80 columns and not where there is room for everything: parts of words, and words cut off."""
    whole = {*printed(shown, WIDE).split()}
    return [word for word in printed(shown, WIDTH).split() if word not in whole and word.strip("─")]
