"""Measure this machine's compute, collectives and copies for the planner, and fit coefficients to them."""
