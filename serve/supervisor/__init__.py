"""A small process that holds the listening sockets and keeps a server process behind them alive.

The command opens the sockets and becomes the supervisor (`launch`), which starts the server as its worker and restarts it
(`supervisor`). The worker takes the sockets over (`launch`). `handover` is what one process passes to the next.
"""
