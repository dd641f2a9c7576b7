"""Which tasks does rpcrl bring along?"""
