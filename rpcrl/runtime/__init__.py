"""How do the driver and the workers of a run work together?"""
