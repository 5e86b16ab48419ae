"""What it runs on: the catalogue of accelerators, and a cluster's devices and links.

devices.py    CATALOGUE: data sheets of GPUs, and the names by which drivers call them
hardware.py   a cluster; a measured profile of it
"""
