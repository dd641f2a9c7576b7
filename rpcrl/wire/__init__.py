"""What do the bytes between two processes mean?"""
