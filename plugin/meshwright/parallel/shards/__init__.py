"""Parameters and tensors of which a rank holds a part: what stands for them, and who may read them."""
