"""Step time, memory and traffic of this project beside other libraries. Run ``python -m benchmarks``."""
