"""A trial of what tp and sp cut: one module of each kind runs whole and cut, before any weight of the model is cut."""
