"""Loaders that read each rank's rows on a mesh.

A position in the data is a number of samples. The order of an epoch depends only on the dataset, the sampler and the
seed; the mesh only determines which rank gets which rows of a batch. So one small state fits every mesh, and a rank can
start at any position. A lane is a sequence of shards of a stream, read by one reader; the stream takes samples from the
lanes in turn.

    loader.py            DistributedLoader: the user's loader on a mesh
    shard_dataloader.py  the same, for loops of their own
    global_batches.py    which samples form a batch, and which rows a rank takes
    shuffling.py         orders of an epoch               sampler_order.py  the order of the user's sampler
    readers/             one for each kind of dataset     shards.py         shards of samples and lanes
    stream.py            datasets in shards               packing.py        documents in rows
    collation_trial.py   whether rows depend on others    collation.py, one_length.py   one length over the ranks
    peers.py             ranks with the same rows         fingerprint.py    the dataset in a saved state
    input_placement.py   batches as DTensors              nested.py         batches as nested values
"""
