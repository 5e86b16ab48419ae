"""The Trainer's optimizers, by name, under plans that shard: each equals one device, or is refused by name."""
