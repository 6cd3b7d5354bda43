"""How wide each row is: what it is worth, how wide that makes it inside a budget, and the rounds in which rows change."""

from .config import Width
from .policy import POLICIES, Policy, policy_of
from .rounds import RoundReport, Rounds
from .shift import Shifts

__all__ = ["POLICIES", "Policy", "RoundReport", "Rounds", "Shifts", "Width", "policy_of"]
