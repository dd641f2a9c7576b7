"""How does one call become a call per rank, and how do the results come back?"""
