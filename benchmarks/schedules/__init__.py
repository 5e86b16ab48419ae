"""What a pipeline schedule costs: idle time, messages, activations, and its step time beside torch's schedules."""
