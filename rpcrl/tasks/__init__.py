"""Which jobs does rpcrl bring along? ``sort_digits`` (the default), GSM8K, and a small real model to run it on."""
