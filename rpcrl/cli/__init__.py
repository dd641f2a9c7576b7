"""What can be typed on a command line?"""
