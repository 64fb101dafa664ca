"""One module per sub-command. Only the app imports it."""
