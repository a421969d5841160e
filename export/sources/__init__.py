"""Turns a user's source into a module with samples: a checkpoint, weights and a factory, an exported program, a folder."""
