"""``meshwright launch``: a job's processes and plan, how they start, and what is said when they end.

launcher.py   starts accelerate's launcher     job.py      processes, hosts and plan
elastic.py    starts the processes again        tied_to_launcher.py   processes end with their launcher
"""
