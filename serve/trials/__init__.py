"""Trials: questions about a model that only running it decides, each within a budget of time."""
