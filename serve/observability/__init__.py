"""What an operator sees of a running server: metrics, traces, the access log."""
