"""What does a worker do in RL? Thin workers over the engines."""
