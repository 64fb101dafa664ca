"""The only modules that use torch's private names."""
