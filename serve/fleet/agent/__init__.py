"""Starting, watching and reporting servers; the agent of a cluster's member carries out the controller's orders."""
