"""How do the processes of a run get started, watched and ended on one node?"""
