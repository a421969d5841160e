"""Generate load in processes of its own: when each request leaves, over which connection, and how long its answer takes."""
