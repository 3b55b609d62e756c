"""Model files: references, headers, quantised blocks, streaming reads.

The README marks the modules that import torch.
"""
