"""What runs a model: one file per runtime."""
