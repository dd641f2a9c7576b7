"""What computes: training engines and rollout engines behind the two interfaces of ``rpcrl.engines.base``."""
