"""Short programs over `shard_tensor` and `reshard`, one process a rank."""
