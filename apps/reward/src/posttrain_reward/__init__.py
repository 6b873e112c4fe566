"""Reward models from preference pairs."""

from posttrain_cli import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Reward": "posttrain_reward.method",
        "RewardConfig": "posttrain_reward.config",
        "RewardTrainer": "posttrain_reward.trainer",
    },
)
