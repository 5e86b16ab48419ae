"""Compares a training program under a plan with the same program on one device, tensor by tensor in float64."""
