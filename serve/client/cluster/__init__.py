"""Calls to a cluster: its directory, the choice of a member for each call, and channels that represent all members."""
