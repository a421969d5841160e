"""Several server processes that answer as one server.

A member is a server that shares a folder with the other members. It listens there on a Unix socket, over which the others
call it with the ordinary protocol (`siblings`). `whole_service` calls all members where an RPC concerns all of them: `merging`
combines their answers, and `journal` keeps the commands for members that join later. `figures` are a member's counters, which
it leaves behind when it ends. `connection_limit` distributes connections evenly. Inference does not depend on any of this.

Members are started and replaced elsewhere; on one machine by serve/supervisor.
"""
