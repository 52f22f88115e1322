"""Planning: whether speculation pays, what a cycle costs, which tree to verify."""
