"""Parts of the controller: members and their leases, the assignment of models, and the state that outlives the controller."""
