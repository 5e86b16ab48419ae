"""Which rank holds which part of a tensor, and how the parts move when that changes."""
