"""What a plan adds to a model, part by part; ``distribute/installation.py`` has their order."""
