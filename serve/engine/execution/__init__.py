"""Runs batches: from requests to arrays and back, on the instances of a model."""
