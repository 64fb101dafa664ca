"""Helpers of tests that start real processes."""
