"""The sections of the operator's loss."""

from typing import Annotated

from pydantic import Field, PositiveInt

from ups.config.sections import NonNegative, Section


class Noise(Section):
    """Normal noise on the states from which training steps, in units of one step's change.

    Its std is `std` + `own_error` |n| e with a normal n for every sample and the family's validation error e, the last
    one, 0 before the first: a network then meets states nearly as exact as the data and states as wrong as its own
    predictions, which keeps rollouts stable where it errs and costs little where it does not.
    """

    std: NonNegative
    own_error: NonNegative


class Unroll(Section):
    """How far the operator is unrolled in training: 1 step until the share `start` of all training steps.

    From there on the horizon grows linearly to `horizon`. With `pushforward` no gradient flows from one unrolled step
    into the one before it (Brandstetter et al. 2022, arXiv:2202.03376).
    """

    horizon: PositiveInt
    pushforward: bool
    start: Annotated[float, Field(ge=0.0, lt=1.0)]


class Term(Section):
    """A term of the loss that counts `weight` times; at 0 it is not computed."""

    weight: NonNegative


class Query(Term):
    """Error at `num_points` random points, in every `every`-th step; its weight grows over `warmup_steps` steps."""

    num_points: PositiveInt
    every: PositiveInt
    warmup_steps: Annotated[int, Field(ge=0)]


class Terms(Section):
    """Terms that training adds to the error of the latents; validation never does. See `ups.training.terms`.

    `spectral` compares changes of latents, the others decoded fields: at points, integrals that the PDE conserves,
    signs, values at boundaries, divergence of incompressible flow.
    """

    query: Query
    spectral: Term
    conservation: Term
    positivity: Term
    boundary: Term
    divergence: Term
