"""A float32 module in float16, except for what float16 cannot hold."""
