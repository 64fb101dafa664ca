"""Values of variables as trees of plain data, and back. They know nothing of scopes."""
