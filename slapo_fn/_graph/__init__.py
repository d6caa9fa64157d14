"""A forward as a graph, and the parts of one: traced, drawn out as modules, put back."""
