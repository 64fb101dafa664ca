"""The training process: the only package that imports torch. The agent starts it; nothing else imports it."""
