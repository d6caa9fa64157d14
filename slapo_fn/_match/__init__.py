"""Find what a function computes inside a graph: what counts as equal, and where it is."""
