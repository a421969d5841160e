"""The parts of benchmarks.reloads."""
