"""From requests to arrays and back: what runs on a worker thread."""
