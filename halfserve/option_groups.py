"""Options of a command declared by the fields of a dataclass, so that commands, Python callers and configuration share them.

A field's type is `Annotated[type, typer.Option(...)]`, and its default is the option's. A field whose type is wider than what a
command line can say, such as any collection of names, adds a `CommandLineType`. A field whose type is neither annotated nor a
dataclass is no option: Python callers alone can give it.
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
    """Type that the command line reads for a wider field: `Annotated[Collection[str], CommandLineType(list[str]), ...]`.

    Attributes:
        type: The type.
        default: The option's default, where the field's is not of that type; `...` for the field's own.
    """

    type: Any
    default: Any = ...


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
    for name, annotation, default in _shown(parameter.annotation):
        yield from _options(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=annotation))


def _shown(group: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default on the command line of each field that is an option or a group of options."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        annotation, default = types[field.name], field.default
        metadata = getattr(annotation, "__metadata__", ())
        if not metadata and not is_dataclass(annotation):
            continue
        chosen = next((entry for entry in metadata if isinstance(entry, CommandLineType)), None)
        if chosen is not None:
            annotation = Annotated[chosen.type, *metadata]
            default = default if chosen.default is ... else chosen.default
        yield field.name, annotation, inspect.Parameter.empty if default is MISSING else default


def _value(name: str, annotation: Any, given: dict[str, Any]) -> Any:
    if not is_dataclass(annotation):
        return given[name]
    make: Any = annotation
    return make(**{name: _value(name, annotation, given) for name, annotation, _ in _shown(annotation)})
