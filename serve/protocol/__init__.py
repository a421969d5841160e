"""KServe v2's RPCs as functions from message to message."""
