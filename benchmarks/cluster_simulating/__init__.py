"""Parts of `benchmarks.cluster_simulation`: virtual time and simulated members."""
