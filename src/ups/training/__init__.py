"""Training: one loop for all stages, on any number of processes.

- `stage`: what a stage is: a model, a loss, samples; sizes of its batches
- `stages`: one module per stage, and the table `STAGES`
- `loop`: the training loop, validation, resuming
- `history`: steps, losses and samples seen by a run; wall-clock time of its steps
- `batches`: the samples of every step and rank, read ahead by a thread, in micro-batches
- `update`: one optimizer step with skipping, clipping and weight averaging; compilation
- `optimizers`: AdamW, Muon, learning rate schedules
- `parallel`: replicated or sharded models, averaged gradients, states independent of the number of ranks
- `distributed`: ranks and their collectives; random numbers independent of the number of ranks
- `checkpoints`: states on disk, verified by hash
- `losses`: terms that can be added to the operator's loss
- `symmetry`: mirrored and rotated samples, conserved integrals
- `inputs`: latent cache, model sizes and statistics of the stages that are trained on latents
- `encoding`: the process that encodes the latent cache, alone or as one of torchrun's ranks
- `adaptation`, `starts`, `examples`: learning from a few trajectories, from which networks, in memory
- `adapted_model`: the side of `Model.adapt` that trains
- `worker`: the process that torchrun starts on every rank
- `injection`: faults injected for tests
"""
