"""Messages as bytes: no sockets. Vault and all above import it."""
