"""What the user asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one conversion.

    Attributes:
        keep_io_types: True: inputs and outputs keep their types; False: they become float16; or names and patterns of those
            that keep theirs.
        op_block_list: Operators, or patterns, that stay float32.
        node_block_list: Nodes, or patterns, that stay float32.
        repair: Whether to rewrite first what float16 could not hold.
    """

    keep_io_types: bool | tuple[str, ...] = True
    op_block_list: tuple[str, ...] = ()
    node_block_list: tuple[str, ...] = ()
    repair: bool = True

    def keeps(self, name: str | None) -> bool:
        """Whether the input or output of this name keeps its type."""
        if isinstance(self.keep_io_types, bool):
            return self.keep_io_types
        return any(fnmatchcase(name or "", pattern) for pattern in self.keep_io_types)

    def summary(self) -> str:
        """All settings in one line, the same for equal settings."""
        kept = self.keep_io_types if isinstance(self.keep_io_types, bool) else ",".join(self.keep_io_types)
        return (
            f"keep_io_types={kept} op_block_list={','.join(self.op_block_list)} "
            f"node_block_list={','.join(self.node_block_list)} repair={self.repair}"
        )


def settings_of(
    keep_io_types: bool | Collection[str],
    op_block_list: Collection[str] | None,
    node_block_list: Collection[str] | None,
    repair: bool,
) -> Settings:
    """The settings, in an order that does not depend on the caller's."""
    return Settings(
        keep_io_types=keep_io_types if isinstance(keep_io_types, bool) else _sorted(keep_io_types),
        op_block_list=_sorted(op_block_list),
        node_block_list=_sorted(node_block_list),
        repair=repair,
    )


def _sorted(names: Collection[str] | None) -> tuple[str, ...]:
    return tuple(sorted({names} if isinstance(names, str) else set(names or ())))
