"""Handwritten digits, from training to a served answer."""
