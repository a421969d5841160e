"""Tensors that a client on the server's machine leaves in shared memory."""
