"""Hugging Face accelerate: another Accelerator, the same loop."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from halfserve.amp_core.integrations.accelerate import HalfserveAccelerator
from halfserve.examples.digits.model import DigitsNet
from halfserve.examples.integrations.digits import LEARNING_RATE, POLICY, TrainingOutcome, batches, outcome


def main(epochs: int = 3) -> TrainingOutcome:
    """Train, and print the outcome."""
    torch.manual_seed(0)
    accelerator = HalfserveAccelerator(mixed_precision="fp16", policy=POLICY)
    net = DigitsNet()
    model, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=LEARNING_RATE), batches())
    skipped = 0
    for _ in range(epochs):
        for images, digits in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), digits))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            skipped += accelerator.optimizer_step_was_skipped
    return outcome(net, skipped, accelerator.scaler)


if __name__ == "__main__":
    main()
