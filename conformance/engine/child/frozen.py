"""Takes what is loaded so far out of the garbage collector's sight, when imported.

The process from which children fork imports this last. A collection in a child then neither walks
through torch, which takes 0.1 s, nor copies the pages that the children share.
"""

import gc

gc.freeze()
gc.enable()  # see `environment`
