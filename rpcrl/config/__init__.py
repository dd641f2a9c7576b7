"""What can be set, what do the settings mean, and which of them contradict each other?"""
