"""Integrations with the Hugging Face stack; each is a module of its own."""
