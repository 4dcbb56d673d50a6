"""Is a reward server fit for use? Checks any server of `shoal.rpc.v1.RewardService`, whoever wrote it."""

from shoal.conformance.checking import check_service
from shoal.conformance.probe import Endpoint
from shoal.conformance.report import Check, CheckLevel, ConformanceReport

__all__ = ["Check", "CheckLevel", "ConformanceReport", "Endpoint", "check_service"]
