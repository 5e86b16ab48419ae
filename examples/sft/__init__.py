"""Supervised fine-tuning with a chat template, from conversations to an answer."""
