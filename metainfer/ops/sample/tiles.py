"""Sizes of the sampling kernels, read by kernels, calls and audit. No torch."""

PART = 4096
"""Ids that one program of a row looks at; the last program to arrive goes on with the row."""

LANES = 4096
"""Ids that it then looks at in one go."""

WARPS = 16
