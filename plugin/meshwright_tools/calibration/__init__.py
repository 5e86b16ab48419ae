"""Measure this machine's compute, collectives and copies for the planner, and fit coefficients to them.

measure.py   what is measured, and the profile     compute.py       probes of compute and copies
from_probes.py   fits coefficients
"""
