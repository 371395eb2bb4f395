"""What a response earns: rewards by name, ours or the user's own, added up by weight."""

from attnrl.reward.builtin import REWARDS, exact, math, overlong
from attnrl.reward.declare import declare
from attnrl.reward.rewards import Rewards, build_rewards

__all__ = ["REWARDS", "Rewards", "build_rewards", "declare", "exact", "math", "overlong"]
