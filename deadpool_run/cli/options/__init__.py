"""Options: declared once as a table, read from the command line and from files."""
