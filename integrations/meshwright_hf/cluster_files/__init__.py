"""Files that start a plan on a cluster: one module for each scheduler, each with a function ``text``."""
