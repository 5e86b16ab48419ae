"""Files as one device has them: safetensors of whole weights, and the state of an optimizer."""
