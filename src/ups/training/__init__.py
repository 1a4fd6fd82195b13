"""Training: one loop, five stages, any number of processes."""
