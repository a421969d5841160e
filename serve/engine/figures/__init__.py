"""What is counted."""
