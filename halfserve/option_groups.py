"""Options of a command declared by the fields of a dataclass, so that commands, Python callers and configuration share them.

A field's type is `Annotated[type, typer.Option(...)]`, and its default is the option's. A field whose type is wider than what a
command line can say, such as any collection of names, adds a `CommandLineType`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

VALIDATOR = "Value error, "  # pydantic writes this before the text of a validator's ValueError


@dataclass(frozen=True)
class CommandLineType:
    """Type that the command line reads for a wider field: `Annotated[Collection[str], CommandLineType(list[str]), ...]`."""

    type: Any


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer a command's dataclass parameters as the options that their fields declare, nested dataclasses included."""

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(**{name: _value(name, parameter.annotation, given) for name, parameter in signature.parameters.items()})

    signature = inspect.signature(command, eval_str=True)
    shown = [option for parameter in signature.parameters.values() for option in _options(parameter)]
    with_options.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return with_options


class OptionCommand(TyperCommand):
    """A command whose errors name a wrong value, and not the library that checked it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(VALIDATOR)
            raise


@contextmanager
def reading(option: str) -> Iterator[None]:
    """Report a value that the block rejects with a ValueError as a wrong value of the option."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"{option} {error}") from None


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if not is_dataclass(parameter.annotation):
        yield parameter
        return
    types = get_type_hints(parameter.annotation, include_extras=True)
    for field in fields(parameter.annotation):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        annotation = _command_line_type(types[field.name])
        yield from _options(inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=default, annotation=annotation))


def _command_line_type(annotation: Any) -> Any:
    """Return a field's annotation with its `CommandLineType`, if it has one, in place of its own type."""
    metadata = getattr(annotation, "__metadata__", ())
    chosen = next((entry.type for entry in metadata if isinstance(entry, CommandLineType)), None)
    return annotation if chosen is None else Annotated[chosen, *metadata]


def _value(name: str, annotation: Any, given: dict[str, Any]) -> Any:
    if not is_dataclass(annotation):
        return given[name]
    types = get_type_hints(annotation)
    make: Any = annotation
    return make(**{field.name: _value(field.name, types[field.name], given) for field in fields(annotation)})
