"""Loops that need more than the usual five lines, each in one file to copy from.

    python -m examples.recipes.accumulation         one step for the gradients of many small batches
    python -m examples.recipes.gradient_penalty     a loss with its own gradient in it: backward twice
    python -m examples.recipes.several_optimizers   two losses, two optimizers, one GradScaler

Each trains a small network in float32 and in float16, on the accelerator if there is one, and prints how the two compare.
"""
