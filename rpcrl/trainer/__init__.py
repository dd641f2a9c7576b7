"""How does a training run go, step by step?"""
