"""Speed and memory of training on this machine.

- `pace`: seconds per training step of several stages, measured alternately; sets the number of steps of the baselines
- `tune`: the largest micro-batch that fits into memory
- `profile`: time and memory of the parts of a training step, by torch.profiler
- `benchmark`: which two setups are compared, start-up times, and the records of the results
- `exported`: speed of exported models against the eager one
- `timing_worker`: times two setups of a stage (configuration, launch, data path) alternately in one process group
- `report`: tables and figures of benchmark and profile
"""
