"""One module for each command, with its name. Only the app imports it."""
