"""What one node does: carry out orders, report what is there, find hung workers. Cluster imports it."""
