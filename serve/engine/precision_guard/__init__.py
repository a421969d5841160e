"""Checks a model's numbers while it serves: non-finite values, and the drift from its fp32 twin."""
