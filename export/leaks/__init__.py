"""Find where a model falls out of float16: what promotes it, what float16 cannot hold, what only works by luck."""
