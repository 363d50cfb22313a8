"""The newest stand-in, completed by the reference: an implementation for a child process."""

import moe_ref
from conformance.peers.te_standin import standin
from moe_fast.te import Adapter

completed = Adapter(standin("2.20"), ours=moe_ref)
