"""Messages and their encoding, without sockets. The vault and all rooms above it import this one."""
