"""Finds models on disk, and loads their versions."""
