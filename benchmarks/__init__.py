"""What slapo_fn costs, measured beside the same thing written by hand. Run it with ``python -m benchmarks``."""
