"""Collectives on a device (NCCL), as one protocol for groups, registry and loop."""
