"""1,797 scanned handwritten digits of 8x8 pixels: scikit-learn ships them, so nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

BRIGHTEST = 16  # a pixel counts the dark points of a 4x4 block
HELD_OUT = 0.25


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the held-out set, always the same ones, every digit with the same share in both.

    Returns:
        Two data sets of pairs (image, digit): float32 of shape (1, 8, 8) between 0 and 1, and an int64 scalar.
    """
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images, digits, test_size=HELD_OUT, stratify=digits, random_state=0)
    train_images, held_out_images, train_digits, held_out_digits = (torch.from_numpy(part) for part in parts)
    return _pairs(train_images, train_digits), _pairs(held_out_images, held_out_digits)


def _pairs(images: torch.Tensor, digits: torch.Tensor) -> TensorDataset:
    return TensorDataset((images / BRIGHTEST).float().reshape(-1, 1, 8, 8), digits.long())
