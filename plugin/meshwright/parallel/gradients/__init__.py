"""Gradients: flat buckets, and their sums over ranks while backward runs."""
