"""Which models the holder of a token may use."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from serve.security.errors import SecurityError

MAX_PATTERN = 255  # as long as the longest name


@dataclass(frozen=True)
class ModelRights:
    """A set of models, by patterns of their names.

    Attributes:
        patterns: names, or patterns with *, ? and [...] as in a shell, case told apart; none stands for no model at all.
    """

    patterns: tuple[str, ...]

    def allow(self, name: str) -> bool:
        """Whether a model is among them."""
        return name in self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)


NO_MODELS = ModelRights(())


def model_rights(patterns: list[str]) -> ModelRights | None:
    """The rights that patterns stand for, in whatever order they are given; None, which is all models, where there are none.

    Raises:
        SecurityError: a pattern cannot stand in the token file.
    """
    for pattern in patterns:
        if not _is_pattern(pattern):
            raise SecurityError(
                f"model {pattern[:40]!r} is neither a name nor a pattern; expected up to {MAX_PATTERN} characters without "
                "spaces, such as 'digits*' ('?' stands for any one character, a space too)"
            )
    return ModelRights(tuple(sorted(set(patterns)))) if patterns else None


def _is_pattern(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= MAX_PATTERN and not any(map(str.isspace, text))
