"""How is a response scored?"""
