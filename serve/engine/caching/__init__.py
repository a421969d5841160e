"""The response cache: a model's answers kept in memory, and identical requests computed once."""
