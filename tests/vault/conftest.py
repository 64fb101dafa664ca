"""Puts this folder on the path, for what the tests of its folders share."""
