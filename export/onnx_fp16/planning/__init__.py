"""Plans the conversion: the values that become float16, and the nodes that stay in float32, with reasons."""
