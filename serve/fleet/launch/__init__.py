"""Programs that start the servers of a fleet.

The command of a server opens its sockets and becomes the supervisor (`supervision`), a small process that holds the sockets and
keeps the servers behind them alive (`supervisor`). `cluster_commands` are those of `halfserve cluster`, which runs agents and
controller on Ray (`ray_*`).
"""
