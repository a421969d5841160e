"""Models on disk: where they lie, which versions there are, and one of them loaded."""
