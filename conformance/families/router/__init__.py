"""The router: gate, top-k selection, capacity, balancing losses; `route` over several steps."""

from conformance.core.family import Family, by_function
from conformance.core.shared_out import SharedOut
from conformance.families.router import (
    golden,
    illegal,
    laws,
    machine,
    space,
    space_route,
)
from conformance.families.router.balancing import (
    AuxLossScores,
    LoadBalancingLoss,
    SinkhornRouting,
    UpdateExpertBias,
    ZLoss,
)
from conformance.families.router.capacity import DropTokens
from conformance.families.router.gating import AttachLoss, Gate, Jitter
from conformance.families.router.route_ranks import RouteOverRanks
from conformance.families.router.selection import TopkIndices, TopkRouting

FAMILY = Family(
    contracts=(
        *(SharedOut(Gate(), ("weight", "bias")), Jitter(), TopkIndices(), TopkRouting(), SinkhornRouting()),
        *(DropTokens(), AuxLossScores(), LoadBalancingLoss(), ZLoss(), AttachLoss(), UpdateExpertBias()),
        RouteOverRanks(),
    ),
    golden=by_function(golden),
    illegal=by_function(illegal),
    laws=by_function(laws),
    space=by_function(space, space_route),
    machines=by_function(machine),
)
