"""Which rank holds which part of a tensor, and how the parts travel when that changes."""
