"""Save and load a distributed model and its optimizer as whole tensors."""
