"""The state of a host as data and as a table."""
