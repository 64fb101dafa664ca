"""`deadpool-run check`: which faults, running them, comparing, the report."""
