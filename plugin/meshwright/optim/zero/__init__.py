"""ZeRO: which rank steps which elements, and what a rank holds of weights, gradients and states."""
