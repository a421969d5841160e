"""Reads a config.pbtxt: completes it from the model file, checks it and interprets it."""
