"""The memory of one device at the peak of a step, part by part.

footprint.py     the sum, by parts          activations.py   what a layer keeps for backward
held_states.py   weights, gradients and optimizer states     peak.py   the moment of the peak
"""
