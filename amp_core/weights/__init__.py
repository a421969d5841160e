"""Weights in files of all usual formats, and how they are loaded into a module."""
