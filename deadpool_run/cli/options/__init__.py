"""Options: declared once as a table, read from the command line and from files. Commands and cluster import it."""
