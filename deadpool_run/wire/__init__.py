"""Messages as bytes: no sockets."""
