"""The policies by name, and how each is made for a job."""

from collections.abc import Callable, Sequence
from typing import Literal

from ftd.errors import ConfigurationError
from ftd.replay.job import ReplayJob
from ftd.replay.parameters import Parameters
from ftd.replay.policies.bamboo import BambooPolicy
from ftd.replay.policies.checkpoint import CheckpointPolicy
from ftd.replay.policies.ftd import FtdPolicy
from ftd.replay.policies.ideal import IdealPolicy
from ftd.replay.policies.oobleck import OobleckPolicy
from ftd.replay.policies.recycle import RecyclePolicy
from ftd.replay.policies.reft import ReftPolicy
from ftd.replay.policies.torchft import TorchftPolicy
from ftd.replay.policies.varuna import VarunaPolicy, VarunaWithoutCheckpointsPolicy
from ftd.replay.policy import RecoveryPolicy
from ftd.replay.virtual_cluster import FtdParameters

ThroughputSource = Literal["common", "published"]
"""Throughput without failures: ``common`` takes that of the job's best plan for every policy; ``published`` takes,
for systems for which the model card has constants, those that reproduce the published tables.
"""

_MAKERS: dict[str, Callable[[ReplayJob, Parameters, bool], RecoveryPolicy]] = {
    "ideal": lambda job, _, __: IdealPolicy(job),
    "ftd": lambda job, parameters, _: FtdPolicy(job, parameters.section("ftd", FtdParameters)),
    "oobleck": OobleckPolicy,
    "varuna": VarunaPolicy,
    "varuna-no-checkpoints": VarunaWithoutCheckpointsPolicy,
    "bamboo": BambooPolicy,
    "recycle": lambda job, parameters, _: RecyclePolicy(job, parameters),
    "torchft": lambda job, parameters, _: TorchftPolicy(job, parameters),
    "checkpoint": lambda job, parameters, _: CheckpointPolicy(job, parameters),
    "reft": lambda job, parameters, _: ReftPolicy(job, parameters),
}
"""Makers of policies by name, from a job, the parameters, and whether published throughput is taken."""

POLICIES: tuple[str, ...] = tuple(_MAKERS)
"""Names of all policies, in the order in which results list them."""


def make_policy(
    name: str, job: ReplayJob, parameters: Parameters, throughput: ThroughputSource = "common"
) -> RecoveryPolicy:
    """Return a policy that can replay one trace.

    :raises PolicyExcluded: the job violates an assumption of the policy.
    :raises ConfigurationError: the name or a parameter is wrong.
    """
    require_policies([name])
    return _MAKERS[name](job, parameters, throughput == "published")


def require_policies(names: Sequence[str]) -> None:
    """Check the names before any work.

    :raises ConfigurationError: a name is unknown.
    """
    for name in names:
        if name not in POLICIES:
            raise ConfigurationError(
                f"there is no policy {name!r}", field="--policy", remedy=f"one of {', '.join(POLICIES)}"
            )
