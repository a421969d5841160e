"""Which items of an epoch are whose: one rule for data sets with a length and for streams."""

from __future__ import annotations

from dataclasses import dataclass

from amp_core.data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Split:
    """The items of an epoch, dealt in rounds.

    A round is `world_size * batch_size` consecutive items of the epoch's order; rank r takes every `world_size`-th from the
    r-th on, which is its batch. All rounds but the last are full, so the batch numbered k holds the same items whoever asks.

    Attributes:
        batch_size: Items per rank in a full batch.
        rank: From 0.
        world_size: The number of ranks.
        training: Then all ranks must have equally many batches. In evaluation each item must come exactly once instead.
        drop_last: Whether to leave out a last round that is not full. None: in training, unless it is the only one, because
            a batch of one item would break BatchNorm; never in evaluation.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    training: bool
    drop_last: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise DataError(f"rank must be from 0 to world_size - 1, got rank {self.rank} of {self.world_size}")

    @property
    def round_size(self) -> int:
        """Items that all ranks together use for one batch each."""
        return self.batch_size * self.world_size

    def uses(self, number: int, items: int) -> bool:
        """Whether this rank makes a batch of a round.

        Args:
            number: The round's, from 0.
            items: How many items the round has; fewer than `round_size` in the last one only.
        """
        if items == self.round_size:
            return True
        if self.drop_last or (self.drop_last is None and self.training and number > 0):
            return False
        # In training either every rank gets a share of the last round or none does: one more batch on some would hang DDP.
        return items >= self.world_size if self.training else items > self.rank

    def batches(self, items: int) -> int:
        """How many batches this rank makes of an epoch with so many items."""
        full, rest = divmod(items, self.round_size)
        return full + self.uses(full, rest)

    def require_enough(self, items: int, name: str) -> None:
        """Check that a whole epoch's items make a batch.

        Args:
            items: In the epoch, over all ranks.
            name: Of the data set.

        Raises:
            DataError: If they do not.
        """
        if items == 0:
            raise DataError(f"the data set {name} has no items; expected at least one")
        if self.training and items < self.world_size:
            raise DataError(
                f"the training set {name} has {_count(items)} for {self.world_size} ranks; expected one each at least"
            )
        if self.drop_last and items < self.round_size:
            raise DataError(
                f"the data set {name} has {_count(items)}, a batch over {self.world_size} rank(s) takes {self.round_size} and "
                "drop_last leaves out a short one: nothing is left; take a smaller batch_size or drop_last=None"
            )


def _count(items: int) -> str:
    return "1 item" if items == 1 else f"{items} items"
