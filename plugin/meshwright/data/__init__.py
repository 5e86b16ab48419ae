"""Loaders that read each rank's rows on a mesh."""
