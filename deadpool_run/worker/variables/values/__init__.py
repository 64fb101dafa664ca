"""Values of variables as trees of plain data, and back. Variables imports it; it knows nothing of scopes."""
