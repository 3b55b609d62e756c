"""Sizes of the kernel that sorts pairs by expert, read by its calls and the audit. No torch."""

SORTED_PAIRS = 2048
"""Most (token, choice) pairs that one launch sorts; more go to the library's sort."""

SORT_SLOTS = 128
"""Pairs whose places one program finds."""
