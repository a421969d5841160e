"""Which values become float16, and which nodes stay in float32 and why."""
