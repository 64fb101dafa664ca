"""The script's own variables, which a repeated step and a replacement get back. Snapshot imports it."""
