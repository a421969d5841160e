"""A small process that holds the listening sockets and keeps a server process behind them alive.

The command opens the sockets and becomes the supervisor (`launch`), which starts and restarts the server as its worker
(`supervisor`). The worker takes over the sockets (`launch`). `handover` defines what one process passes to the next.
"""
