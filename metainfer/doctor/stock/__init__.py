"""What a stock engine silently loses on a machine: from tables, without the engine."""
