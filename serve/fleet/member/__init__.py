"""Membership of a server in a group of servers that answer as one; inference does not depend on it.

Members and agents call each other over Unix sockets in a folder that they share (`member_socket`). Of the processes of one
machine, the one that is asked calls all others where an RPC concerns all, and keeps commands for processes that join later
(`process_service`). A member of a cluster asks the controller instead, through its agent (`cluster_member`).
"""
