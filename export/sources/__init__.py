"""What a user has becomes a module with samples: a checkpoint, weights and a factory, an exported program, a model's folder."""
