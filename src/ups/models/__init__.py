"""Networks on tokens, the codec between fields and tokens, and the baselines.

- `sizes`: sizes and options of the networks as plain values (`Sizes`, `Backbone`), without torch
- `codec`: fields to latents and back: normalization, patches, trained orthonormal bases
- `backbone`: the network of all models: Fourier mixing, blocks, trunks, stem and head per family
- `blocks`: stacks of blocks, one after the other or in a U-shape; attention, windows, separate tokens for each field
- `state_statistics`: statistics of latent states, and the limits that keep rollouts finite
- `conservation`: constraints on predicted states: integrals of compressible flow, divergence of incompressible flow
- `grid`: values of patches on the grid, Fourier modes of its axes
- `operator`: one time step (`Operator`), or the solution of a steady PDE (`SteadyModel`)
- `denoiser`: the diffusion model of the residual (truth minus prediction), and its losses
- `baselines`: FNO, U-Net, transformer and linear stencil on the grid
- `weights`: trained models on disk
"""
