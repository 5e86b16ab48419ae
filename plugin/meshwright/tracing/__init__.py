"""What a plan costs, read off a run with fake tensors."""
