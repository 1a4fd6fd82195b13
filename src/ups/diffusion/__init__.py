"""Diffusion in the notation of EDM (Karras et al. 2022): losses and samplers, given a denoiser."""
