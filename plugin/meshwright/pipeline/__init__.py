"""Pipeline parallelism: cuts a decoder into stages and runs a batch's micro-batches through them by a schedule."""
