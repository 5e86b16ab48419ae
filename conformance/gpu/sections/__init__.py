"""The sections of ``python -m conformance.gpu``; each is a class of its own module and runs in its own process."""
