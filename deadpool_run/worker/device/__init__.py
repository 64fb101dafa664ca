"""Collectives on a device (NCCL), behind one protocol that groups, registry and loop speak to. May import compat."""
