from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.checkerboard.image import checkerboard, coordinate_grid


def test_the_grid_gives_x_along_the_row_and_y_down_the_column() -> None:
    grid = coordinate_grid(5)
    assert (grid.shape, grid.dtype) == ((1, 2, 5, 5), torch.float32)
    along = [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert grid[0, 0].tolist() == [along] * 5
    assert grid[0, 1].T.tolist() == [along] * 5


def test_a_small_board() -> None:
    assert checkerboard(4, 2)[0, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]


@given(st.integers(1, 12), st.integers(1, 5))
def test_every_field_differs_from_its_neighbours(squares: int, pixels: int) -> None:
    board = checkerboard(squares * pixels, squares)[0, 0]
    fields = board[::pixels, ::pixels]
    assert board.tolist() == fields.repeat_interleave(pixels, 0).repeat_interleave(pixels, 1).tolist()
    assert (fields[1:] + fields[:-1] == 1).all()
    assert (fields[:, 1:] + fields[:, :-1] == 1).all()
    assert fields[0, 0] == 0
