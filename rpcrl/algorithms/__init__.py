"""What are the mathematics of the training, free of models, processes and configuration files?

Pure functions on tensors: N samples of R response columns (right-padded), masks that say which tokens count.
"""
