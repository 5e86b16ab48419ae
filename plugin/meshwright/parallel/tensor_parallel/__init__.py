"""Tensor and sequence parallelism: a decoder's layouts, and the hooks at its blocks, embedding, head and towers."""
