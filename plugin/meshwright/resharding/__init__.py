"""Computes which rank holds which part of a tensor, and moves the parts between layouts.

layouts.py          users' meshes, placements and DTensors as checked layouts
move.py             moves a tensor between layouts, also of two meshes, without autograd
plain_operands.py   plain tensors beside DTensors
"""
