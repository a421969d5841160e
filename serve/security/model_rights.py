"""Authorization: the models that a token may be used for."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from halfserve.serve.security.security_options import SecurityError

MAX_PATTERN = 255  # the length of the longest model name


@dataclass(frozen=True)
class ModelRights:
    """A set of models, by patterns of their names."""

    patterns: tuple[str, ...]  # names, or case-sensitive shell patterns with *, ? and [...]; the empty tuple matches no model

    def allow(self, name: str) -> bool:
        return name in self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)


NO_MODELS = ModelRights(())


def model_rights(patterns: list[str]) -> ModelRights | None:
    """Return the rights that patterns grant; None, which stands for all models, without any pattern.

    Raises:
        SecurityError: a pattern cannot stand in the token file.
    """
    for text in patterns:
        if not (text.isprintable() and 0 < len(text) <= MAX_PATTERN and not any(map(str.isspace, text))):
            raise SecurityError(
                f"model {text[:40]!r} is neither a name nor a pattern; expected up to {MAX_PATTERN} characters without "
                "spaces, such as 'digits*' ('?' stands for any one character, a space too)"
            )
    return ModelRights(tuple(sorted(set(patterns)))) if patterns else None
