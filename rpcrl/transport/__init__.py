"""How do messages get from one process to another?"""
