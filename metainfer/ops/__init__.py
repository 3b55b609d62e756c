"""One folder per op: maths, reference, kernels, declarations, cases."""
