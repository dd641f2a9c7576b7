"""Which numbers does RL compute? Pure functions on tensors."""
