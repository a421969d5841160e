"""Batching and bookkeeping, independent of any transport."""
