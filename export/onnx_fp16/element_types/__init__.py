"""The element type of every value, and which values must have the same."""
