"""A readable training loop, from factories to a checkpoint."""
