"""What the planner says: tables, reasons, costs, and what would make a plan fit.

explain.py   why this plan           notes.py     what would make a plan fit, warnings
cost.py      hours, prices           sweep.py     several clusters or batch sizes
"""
