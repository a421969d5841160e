"""Requests of different lengths in one batch: the rule, the lengths to pad to, the padded arrays, and the cut answers."""
