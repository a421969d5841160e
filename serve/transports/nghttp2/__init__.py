"""gRPC over libnghttp2: one connection's frames, its calls, and the socket that carries them."""
