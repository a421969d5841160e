"""Parts of `benchmarks.half_hardware`."""
