"""A picture learned from its pixels' coordinates, once in float32 and once in mixed precision, side by side.

A network of 1x1 convolutions (2 -> 256 -> 256 -> 256 -> 1, BatchNorm and ReLU between) is given the grid of coordinates of an
image and learns the brightness of each pixel, with Adam and a mean squared error. Each precision starts from the same weights:

    python -m examples.checkerboard
    python -m examples.checkerboard --steps 200 --size 64 --dtype bfloat16 --out runs/checkerboard.png
    python -m examples.checkerboard --device cuda --size 512 --json

It prints a table of final losses and times (on CUDA also the peak memory) and draws the target and what each precision made of
it. What mixed precision gains shows on a GPU. A CPU without fp16 arithmetic gains no speed from float16: it takes many times as
long as float32, and what the table shows there is that the losses agree. bfloat16 is faster than float32 only on a CPU that has
instructions for it.
"""
