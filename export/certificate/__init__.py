"""The verdict that travels with a model."""
