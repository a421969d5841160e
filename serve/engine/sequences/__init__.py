"""Sequences: requests that belong together, in order, with states that the server keeps between them."""
