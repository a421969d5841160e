"""Many requests over one call."""
