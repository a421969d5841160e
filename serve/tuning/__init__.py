"""Find the settings of a model with the highest throughput within a latency limit, by measuring."""
