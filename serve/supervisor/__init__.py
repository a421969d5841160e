"""A small process that holds the listening sockets and keeps a server process behind them alive.

The command opens the sockets and becomes the supervisor (`launch`); that starts the server as its worker, again and again
(`supervisor`); the worker finds out what it was given (`inheritance`). The supervisor imports nothing but the standard library.
"""
