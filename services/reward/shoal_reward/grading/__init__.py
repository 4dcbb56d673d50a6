"""A pool of processes that run plain scorers and can be killed: one bad answer costs one of them for its limit, not the pool."""
