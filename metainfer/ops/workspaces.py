"""What ops take beside inputs and results, as the memory ledger counts it. No torch.

Apart from the ops' tiles: kernels are compiled from those, and are the same whatever stands here.
"""

FILTER_BYTES = 16
"""Of `sample`: what a logit of a row with top-k or top-p takes: its number, its id, its weight."""
