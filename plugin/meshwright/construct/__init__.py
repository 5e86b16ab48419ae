"""Deferred initialisation: each rank computes its shards of the initial weights only."""
