"""Train a Llama on the Python standard library with four processes, and prove that one process gets the same result."""
