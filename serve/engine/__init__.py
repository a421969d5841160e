"""Batching and bookkeeping, free of any transport."""
