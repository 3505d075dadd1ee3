"""Leases: one locked file for each claimed GPU, and what its neighbours in that directory say."""
