"""Status and plan of a run, as users see them. No torch."""
