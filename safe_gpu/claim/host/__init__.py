"""The host as one request sees it."""
