"""Initial weights without waste: deferred initialisation, and what a rank builds of it."""
