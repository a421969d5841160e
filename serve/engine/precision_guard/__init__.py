"""Watches a model's numbers while it serves: values that are not finite, and the distance from its fp32 twin."""
