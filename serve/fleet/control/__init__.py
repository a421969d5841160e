"""The controller of a cluster: members and their leases, rollout and placement of models, counters, autoscaling."""
