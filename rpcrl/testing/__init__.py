"""With which kits can an implementation be checked?"""
