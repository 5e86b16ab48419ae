"""Compares a training program under a plan with the same program on one device, tensor by tensor in float64.

verify.py             the call                     program.py             the program that runs twice
batch_cases.py        its batches                  local_processes.py     its processes
module_outputs.py     what modules return          comparison_report.py   what differs
float64_modules.py    no casts to float32    short_model.py         a small model of a real config
"""
