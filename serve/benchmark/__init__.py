"""Load a server and report what it did."""
