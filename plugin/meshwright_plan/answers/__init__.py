"""What the planner says: tables, reasons, costs, and what would make a plan fit.

explain.py   why this plan           notes.py     what would make a plan fit, warnings
cost.py      hours, prices           own_plan.py  the user's plan beside the planner's
sweep.py     several clusters or batch sizes
"""
