"""Pipelines over several processes, with a cache of what a rank already has, for any network with a DepthStack."""

from depthmix.parallel.pipeline import Pipeline, stages
from depthmix.parallel.plan import Plan, make_plan
from depthmix.parallel.stage import CachedStage
from depthmix.parallel.store import Store
from depthmix.parallel.transport import Transport

__all__ = ["CachedStage", "Pipeline", "Plan", "Store", "Transport", "make_plan", "stages"]
