"""Meta-Infer: an inference engine for machines whose GPUs are linked by PCIe alone."""

__version__ = "0.1.0"
