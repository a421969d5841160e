"""Parts of the controller: the members and their leases, what they shall serve, and what the cluster remembers."""
