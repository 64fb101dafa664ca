"""The command line: options and one module per sub-command."""
