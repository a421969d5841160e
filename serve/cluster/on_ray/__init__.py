"""A cluster of servers on Ray: its actors, and the commands of `halfserve cluster`."""
