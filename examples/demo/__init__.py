"""Train a Llama on the Python standard library with four processes, and prove it equal to one."""
