"""How halfserve is installed: where its code runs from, and the command that adds an extra."""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).parent


def code_in_use() -> str:
    """Say whether a checkout's code runs, so that its edits take effect, or an installed copy, and from which folder."""
    checkout = HOME.parent
    if (checkout / "pyproject.toml").is_file():
        return f"from the checkout {checkout}"
    return f"from an installed copy, {HOME}"


def install_hint(extra: str) -> str:
    """Return the commands that install an extra of pyproject.toml beside the code in use.

    Both keep a checkout editable; without -e, pip would put a copy in its place.
    """
    return f"in a checkout of halfserve, run: make install EXTRAS={extra}; in another environment: pip install -e '.[{extra}]'"
