"""Before any test module is imported: moe_fast chooses Triton's interpreter where there is no GPU, which must come before triton is loaded."""

import moe_fast as moe_fast
from conformance.engine.child import interpreting

interpreting.install()
