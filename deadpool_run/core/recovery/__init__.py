"""From a loss to a running world: blame, repair, spares, restart, shutdown."""
