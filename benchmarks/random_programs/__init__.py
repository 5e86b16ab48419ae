"""Legal training programs drawn at random, under plans drawn at random, against one process."""
