"""What tests that start real processes share."""
