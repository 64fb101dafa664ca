"""Kinds of objects: their parts for a snapshot, and objects made of these."""
