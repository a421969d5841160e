"""Additions of a task to a model: inputs and outputs that users know, samples, a verdict of its own, and files for serving."""
