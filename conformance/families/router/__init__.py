"""The router: gate, choice of experts, capacity, balancing losses, and all of them over several steps."""

from conformance.core.family import Family
from conformance.core.shared_out import SharedOut
from conformance.families.router import defects, defects_ranks
from conformance.families.router.balancing import (
    AuxLossScores,
    LoadBalancingLoss,
    SinkhornRouting,
    UpdateExpertBias,
    ZLoss,
)
from conformance.families.router.capacity import DropTokens
from conformance.families.router.gating import AttachLoss, Gate, Jitter
from conformance.families.router.golden import GOLDEN
from conformance.families.router.illegal import RULES
from conformance.families.router.laws import LAWS
from conformance.families.router.route_ranks import RouteOverRanks
from conformance.families.router.selection import TopkIndices, TopkRouting
from conformance.families.router.space import SPACE

FAMILY = Family(
    contracts=(
        *(SharedOut(Gate(), ("weight", "bias")), Jitter(), TopkIndices(), TopkRouting(), SinkhornRouting()),
        *(DropTokens(), AuxLossScores(), LoadBalancingLoss(), ZLoss(), AttachLoss(), UpdateExpertBias()),
        RouteOverRanks(),
    ),
    golden=GOLDEN,
    illegal=RULES,
    laws=LAWS,
    space=SPACE,
    defects=(*defects.DEFECTS, *defects_ranks.DEFECTS),
)
