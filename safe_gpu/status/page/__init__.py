"""The state of hosts as a page for a browser."""
