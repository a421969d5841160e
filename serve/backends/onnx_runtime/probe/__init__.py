"""Models on trial in a child process, which may die of them."""
