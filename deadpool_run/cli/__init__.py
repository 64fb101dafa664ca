"""The command line. No other folder imports it."""
