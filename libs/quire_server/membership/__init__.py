"""Members of the cluster: their heartbeats, their log, and the view that services have of them."""
