"""A reader for each kind of dataset; ``choose.py`` picks one."""
