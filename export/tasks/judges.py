"""Verdicts in the terms of a task: cosine and ranks of embeddings, labels of tokens, decoded speech."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.verdicts import TaskFigure
from halfserve.export.verification.samples import Array, Feed

LEAST_COSINE = 0.999
LEAST_RANKS = 0.99
NEIGHBOURS = 10
# Two neighbours whose cosines differ by less have no order that users rely on.
TIE = 1e-3
MASK = "attention_mask"


def judge_embeddings(
    batches: Sequence[Feed], expected: Sequence[Array], actual: Sequence[Array], budget: Budget
) -> tuple[TaskFigure, ...]:
    """Least cosine of a row with the reference's, and the share of each row's nearest neighbours that stay.

    Answers are embeddings (samples, size), in batches. A neighbour stays if the reference has it among the nearest 10 of the
    other samples, or within `TIE` of the tenth. The limits are of cosines, so the budget is not used.
    """
    del batches, budget
    ours, theirs = _unit_rows(np.concatenate(actual)), _unit_rows(np.concatenate(expected))
    cosine = TaskFigure("least cosine", float((ours * theirs).sum(-1).min()), LEAST_COSINE)
    count = min(NEIGHBOURS, len(theirs) - 1)
    if count < 1:
        return (cosine,)
    scores, found = theirs @ theirs.T, ours @ ours.T
    for table in (scores, found):
        np.fill_diagonal(table, -np.inf)
    lowest = np.partition(scores, -count, axis=-1)[:, -count]
    nearest = np.argpartition(found, -count, axis=-1)[:, -count:]
    kept = np.take_along_axis(scores, nearest, -1) >= lowest[:, None] - TIE
    return (cosine, TaskFigure(f"nearest {count} kept", float(kept.mean()), LEAST_RANKS))


def judge_token_vectors(
    batches: Sequence[Feed], expected: Sequence[Array], actual: Sequence[Array], budget: Budget
) -> tuple[TaskFigure, ...]:
    """Least cosine of a token's vector with the reference's, over tokens that are not masked."""
    del budget
    ours, theirs = (_unit_rows(_real_tokens(batches, answers)) for answers in (actual, expected))
    return (TaskFigure("least cosine of a token", float((ours * theirs).sum(-1).min()), LEAST_COSINE),)


def judge_token_labels(
    batches: Sequence[Feed], expected: Sequence[Array], actual: Sequence[Array], budget: Budget
) -> tuple[TaskFigure, ...]:
    """Share of tokens that get the reference's label, over tokens that are not masked."""
    ours, theirs = (_real_tokens(batches, answers).argmax(-1) for answers in (actual, expected))
    return (TaskFigure("tokens with the same label", float((ours == theirs).mean()), budget.min_agreement),)


def judge_decoded(
    batches: Sequence[Feed], expected: Sequence[Array], actual: Sequence[Array], budget: Budget, *, blank: int
) -> tuple[TaskFigure, ...]:
    """Share of the reference's decoded tokens that stay: 1 less the edits from its text to the candidate's, by its length.

    Answers are logits (clips, time steps, tokens), in batches; `blank` is the token of CTC that stands for none.
    """
    del batches
    pairs = [
        (_decoded(before, blank), _decoded(after, blank))
        for old, new in zip(expected, actual, strict=True)
        for before, after in zip(old, new, strict=True)
    ]
    length = sum(len(before) for before, _ in pairs)
    share = 1 - sum(_edits(before, after) for before, after in pairs) / max(length, 1)
    return (TaskFigure("decoded tokens kept", share, budget.min_agreement),)


def _decoded(logits: Array, blank: int) -> Sequence[int]:
    """Return the tokens of one clip, as CTC's greedy decoding takes them: runs joined, then blanks left out."""
    best = logits.argmax(-1)
    starts = np.concatenate(([True], best[1:] != best[:-1]))
    found: Sequence[int] = best[starts & (best != blank)].tolist()
    return found


def _edits(before: Sequence[int], after: Sequence[int]) -> int:
    """Levenshtein's distance: the fewest tokens to insert, leave out or change."""
    row = list(range(len(after) + 1))
    for index, token in enumerate(before, 1):
        diagonal, row[0] = row[0], index
        for place, other in enumerate(after, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (token != other))
    return row[-1]


def _real_tokens(batches: Sequence[Feed], answers: Sequence[Array]) -> Array:
    """Return the rows (tokens, size) of tokens that no mask leaves out."""
    rows = [
        answer[batch[MASK] != 0] if MASK in batch else answer.reshape(-1, answer.shape[-1])
        for batch, answer in zip(batches, answers, strict=True)
    ]
    found: Array = np.concatenate(rows)
    return found


def _unit_rows(rows: Array) -> Array:
    """Rows of length 1, in float64; a row of zeros stays, and so its cosine is 0."""
    wide = rows.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1, keepdims=True)
    unit: Array = wide / np.where(lengths > 0, lengths, 1.0)
    return unit
