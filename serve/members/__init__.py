"""Several whole servers that answer as one.

A member is a server that shares a folder with all others. It announces itself there by a Unix socket, at which the others reach
it with the ordinary protocol (`siblings`). `whole_service` asks all members where an RPC concerns all of them: `merging` adds
answers up, and `journal` keeps what was commanded, so that a member that joins later does it too. `figures` are a member's
counters, which it leaves behind. `connection_limit` spreads connections evenly. Inference knows nothing of all this.

Who starts members, and replaces them, is no matter of this room; on one machine it is serve/supervisor.
"""
