"""Which jobs does a worker process do in RL training? Actor, critic, rollout, reference: thin workers over engines.

No role is imported here: a process loads only the ones that it hosts.
"""
