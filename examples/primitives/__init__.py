"""Short programs that use `shard_tensor` and `reshard`, with one process per rank."""
