"""Two stages in one launch: permutation or activation, and quantisation."""
