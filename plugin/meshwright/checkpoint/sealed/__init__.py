"""Folders of files that other programs write, with a seal that lists them: for the Trainer and accelerate."""
