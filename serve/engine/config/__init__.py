"""The meaning of a config.pbtxt, completed from the model file and checked."""
