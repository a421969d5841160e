"""Malformed messages of many kinds, and for each the answer that it must get, by rule."""
