"""What a config.pbtxt says, completed and checked."""
