"""Measures the cost of a schedule: idle time, messages, activations, and its step time against torch's schedules."""
