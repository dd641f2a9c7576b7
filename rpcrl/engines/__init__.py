"""What trains a model, and what samples from it?"""
