"""The copies of a model that compute, watched, and which of them may do so next."""
