"""Training runs that others measured and published, against the planner: ``python -m benchmarks.published_runs``."""
