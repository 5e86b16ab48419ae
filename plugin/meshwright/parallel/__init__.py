"""The runtime of a distributed model: collectives, tensor and sequence parallelism, loss, gradients."""
