"""The parts of benchmarks.cuda: what is measured on a CUDA device, and how."""
