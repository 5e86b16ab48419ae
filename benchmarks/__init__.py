"""Measure step time, memory and traffic of Meshwright and other libraries. Run ``python -m benchmarks``."""
