"""Clients of a running server, synchronous and asyncio: numpy arrays in, numpy arrays out.

`halfserve` exports the public names.
"""
