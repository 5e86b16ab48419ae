"""What the numerics tests share: tiny models, exact arithmetic, a one-process reference."""
