"""What it runs on: the catalogue of accelerators, and a cluster's devices and links."""
