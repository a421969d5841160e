"""Weights in files of any usual form, and their way into a module."""
