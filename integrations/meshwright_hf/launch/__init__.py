"""``meshwright launch``: a job's processes and plan, how they start, and what is said when they end."""
