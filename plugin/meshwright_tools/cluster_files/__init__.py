"""Files that start a plan on a cluster: one module for each scheduler, each with a function ``text``.

slurm.py, kubernetes.py, skypilot.py, ray.py      cluster_job.py  what they have in common
"""
