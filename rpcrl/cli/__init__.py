"""What does the command ``rpcrl`` do? It reads, checks, shows and starts; everything else is in the packages below."""
