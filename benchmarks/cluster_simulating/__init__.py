"""Parts of `benchmarks.cluster_simulation`: virtual time, and members that are not there."""
