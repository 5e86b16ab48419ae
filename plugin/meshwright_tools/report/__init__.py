"""The page of ``meshwright report``: the runs of a folder, from the logs that ``meshwright.monitor`` writes.

report.py       the page, also while runs go on        run_folders.py  finds runs in a folder
report_data.py  its figures and tables                 plots.py        its plots
"""
