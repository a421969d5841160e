"""Parts of benchmarks.reloads."""
