"""Who scores the responses? A Python function that the user names by path, run in light CPU processes."""

from rpcrl.rewards.loading import RewardFunction, load_reward, resolve_reward
from rpcrl.rewards.signature import batch_reward, is_batch_reward

__all__ = ["RewardFunction", "batch_reward", "is_batch_reward", "load_reward", "resolve_reward"]
