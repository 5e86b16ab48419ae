"""Loaders that know the mesh."""
