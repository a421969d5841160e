"""Models on disk: find them, and load their versions."""
