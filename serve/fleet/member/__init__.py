"""Membership of a server in a group of servers that answer as one; inference does not depend on it.

Processes of one machine call each other over Unix sockets in a folder that they share (`siblings`). `process_service` calls all
of them where an RPC concerns all, and `command_journal` keeps the commands for processes that join later. A member of a cluster
asks the controller instead, through its agent (`cluster_service`, `agent_questions`), and forwards requests for models that it
does not serve (`forwarder`). `member_counters` outlive a server.
"""
