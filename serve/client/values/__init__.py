"""What goes out and comes back: arrays, parameters, classes, whole answers."""
