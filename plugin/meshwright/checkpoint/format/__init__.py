"""The sharded format: all of a run in one folder, written and read by all ranks."""
