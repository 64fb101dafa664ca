"""The script's own variables, which a repeated step and a replacement get back: where they are, and how they differ."""
