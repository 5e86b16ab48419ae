"""What a forward draws at random, as one device draws it."""
