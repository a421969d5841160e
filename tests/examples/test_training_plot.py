from __future__ import annotations

import io

import matplotlib.image
import pytest

from examples.digits.training_plot import training_plot


@pytest.mark.parametrize("loss", [0.5, None, "inf"])
def test_the_picture_is_a_png_whatever_the_loss_was(loss: object) -> None:
    steps = [{"step": i, "loss": loss if i == 2 else 1.0 / (i + 1), "scale": 65536.0, "skipped": i == 2} for i in range(6)]
    epochs = [{"evaluation_loss": 0.3, "accuracy": 0.9}, {"evaluation_loss": 0.2, "accuracy": 0.95}]
    picture = matplotlib.image.imread(io.BytesIO(training_plot(steps, epochs)), format="png")
    assert picture.shape[:2] == (1050, 1200)
    assert picture[..., :3].std() > 0.05, "something is drawn"
