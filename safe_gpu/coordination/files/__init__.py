"""The state directory: one that users share who do not trust each other, and files in it."""
