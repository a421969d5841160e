"""Lightning Fabric: one plugin, and a loop of one's own."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

from halfserve.amp_core.integrations.lightning import FabricPrecision
from halfserve.examples.digits.model import DigitsNet
from halfserve.examples.integrations.digits import LEARNING_RATE, POLICY, TrainingOutcome, batches, outcome


def main(epochs: int = 3) -> TrainingOutcome:
    """Train, and print the outcome."""
    torch.manual_seed(0)
    plugin = FabricPrecision("16-mixed", policy=POLICY)
    fabric = Fabric(devices=1, plugins=[plugin])
    net = DigitsNet()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=LEARNING_RATE))
    loader = fabric.setup_dataloaders(batches())
    skipped = 0
    for _ in range(epochs):
        for images, digits in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(images), digits))
            # An overflow makes the norm NaN; the step is then skipped.
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            if plugin.scaler is not None:
                skipped += plugin.scaler.step_was_skipped
    return outcome(net, skipped, plugin.scaler)


if __name__ == "__main__":
    main()
