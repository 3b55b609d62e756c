"""Model files: references, headers, quantised blocks, streaming reads.

Every module but `quant` and `checkpoint` imports without torch.
"""
