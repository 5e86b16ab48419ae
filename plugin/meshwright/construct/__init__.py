"""Deferred initialisation: each rank makes only its shards of the initial weights."""
