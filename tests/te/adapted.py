"""The newest stand-in, completed by the reference: an implementation for a child process."""

import moe_ref
from conformance.peers.te import Adapter
from tests.te.standin import standin

completed = Adapter(standin("2.20"), ours=moe_ref)
