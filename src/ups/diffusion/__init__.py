"""Diffusion in the notation of EDM (Karras et al. 2022, arXiv:2206.00364), for any denoiser D(x, sigma).

- `losses`: denoising loss, easy consistency tuning
- `samplers`: noise levels, multistep and consistency sampling, noise that is correlated along a rollout
"""
