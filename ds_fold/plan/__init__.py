"""Times programs before anything runs: a cost model and a simulator. Python and numpy; nothing that predicts imports torch."""

from .costs import Cluster, Costs, Head, Layer, Link, PlanError, Profile, Recomputed
from .simulate import HANDLERS, Result, simulate

__all__ = ["HANDLERS", "Cluster", "Costs", "Head", "Layer", "Link", "PlanError", "Profile", "Recomputed", "Result", "simulate"]
