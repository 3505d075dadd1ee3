"""The state of a host as data and as a table. Read-only: nothing here claims GPUs or waits for them."""
