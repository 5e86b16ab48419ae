"""Ends uneven work with a message on every rank: liveness, agreement, and the first cause."""
