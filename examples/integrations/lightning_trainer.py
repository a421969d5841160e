"""Lightning's Trainer: one plugin, and a hook that counts skipped steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from halfserve.amp_core.integrations.lightning import TrainerPrecision
from halfserve.examples.digits.model import DigitsNet
from halfserve.examples.integrations.digits import LEARNING_RATE, POLICY, TrainingOutcome, batches, outcome


class Classifier(pl.LightningModule):
    """A plain LightningModule, except for the count of skipped steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.skipped = DigitsNet(), 0

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch of pairs (image, digit)."""
        images, digits = batch
        return cross_entropy(self.net(images), digits)

    def configure_optimizers(self) -> Any:
        """Adam, and a rate that falls with every step that was not skipped."""
        optimizer = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the steps that overflowed."""
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, TrainerPrecision) and plugin.scaler is not None:
            self.skipped += plugin.scaler.step_was_skipped


def main(epochs: int = 3) -> TrainingOutcome:
    """Train, and print the outcome."""
    torch.manual_seed(0)
    plugin, classifier = TrainerPrecision("16-mixed", policy=POLICY), Classifier()
    trainer = pl.Trainer(
        plugins=[plugin],
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,  # writes no files, as the next
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, batches())
    return outcome(classifier.net, classifier.skipped, plugin.scaler)


if __name__ == "__main__":
    main()
