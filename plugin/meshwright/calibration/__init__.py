"""Measure this machine for the planner: compute, collectives and copies, and the coefficients that explain them."""
