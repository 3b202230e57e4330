"""The training loop, the losses at the vocabulary head, and the mesh."""
