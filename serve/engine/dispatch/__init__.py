"""Moves requests from a model's queue to its copies, and answers back to the requests, on the event loop."""
