"""What can be done with a checkpoint without its model: look into it, and export its weights."""
