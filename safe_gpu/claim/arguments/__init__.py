"""The arguments of a claim, checked before it changes anything."""
