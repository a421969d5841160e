"""Stands in for the package attrdict, which no longer loads: a dictionary whose values are attributes too, at any depth."""

from __future__ import annotations

from typing import Any


class AttrDict(dict[str, Any]):
    """A dictionary with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return _wrapped(self[name])
        except KeyError:
            raise AttributeError(name) from None


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return AttrDict(value)
    return [_wrapped(part) for part in value] if isinstance(value, list) else value
