"""Load, try out, switch and unload models: at the start, by request, or as the repository changes."""
