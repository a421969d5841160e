"""Parts of benchmarks.cuda: the measurements on a CUDA device."""
