"""Samples that no user gave: derived from theirs, or made of a model's declared inputs."""
