"""What is asked and in which order, free of any input or output."""
