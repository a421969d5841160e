"""How much of a comparison is the load generator's own limit."""
