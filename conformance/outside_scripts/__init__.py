"""Scripts that others publish, from their own checkouts, under plans: equal to one process, or refused."""
