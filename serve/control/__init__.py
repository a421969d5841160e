"""What decides which models are served: at the start, by request, or by what the repository holds."""
