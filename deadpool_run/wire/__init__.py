"""Messages and their encoding, without sockets."""
