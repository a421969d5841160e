"""The loss scale: scale, unscale, check, skip, grow."""
