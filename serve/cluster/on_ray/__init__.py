"""Cluster on Ray: its actors, the Ray Serve application, and the commands of `halfserve cluster`."""
