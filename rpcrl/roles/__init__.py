"""Which jobs does a worker process do in RL training? Actor, rollout and reference: thin workers over the engines.

No role is imported here: a process loads only the ones that it hosts.
"""
