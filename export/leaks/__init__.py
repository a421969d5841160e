"""Where a torch model leaves its dtype: float32 made in `forward`, constants that float16 cannot hold."""
