"""Where this process is in a cluster, found from what the cluster's scheduler tells it. Pure."""
