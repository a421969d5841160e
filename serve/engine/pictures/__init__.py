"""Encoded pictures become pixels here, on threads of their own, before their requests enter a model's queue."""
