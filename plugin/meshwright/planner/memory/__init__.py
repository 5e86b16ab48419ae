"""The memory of one device at the peak of a step, part by part."""
