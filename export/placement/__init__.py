"""The execution provider of each node, measured and predicted, and the float32 islands."""
