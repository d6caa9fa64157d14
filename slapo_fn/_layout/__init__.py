"""Where tensors come from, read in both directions: checkpoints of the model before."""
