"""What can be done with a checkpoint without its model: look into it, and export its weights.

inspect_checkpoint.py  all that is wrong in it     inspection_report.py  what ``meshwright inspect`` prints
export_checkpoint.py   its weights as one-device files
"""
