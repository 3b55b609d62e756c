"""One file per check; each has `check(inputs) -> list[Finding]` and never raises."""
