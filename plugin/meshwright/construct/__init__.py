"""Deferred initialisation: each rank makes only its shards of the initial weights.

Initial weights are a record, not values: under ``deferred_init`` random draws are made and discarded, and the
generator's state before each draw is kept, so any single weight can be computed later, bitwise equal.

    deferred_init.py    the context and the recipe of a tensor    init_recording.py  the tape of operations
    initial_weights.py  each rank's shard from the model, a recipe or a checkpoint
"""
