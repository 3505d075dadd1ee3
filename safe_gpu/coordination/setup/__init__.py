"""The state directory as an administrator prepares it."""
