"""What the caller asks for, checked against what the models were trained on: grid, time step, parameters."""

from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.data.families import Dataset, Family, condition_features
from ups.errors import ConfigFault, nearest
from ups.surrogate.arrays import (
    Array,
    Form,
    as_tensor,
    batch_dimensions,
    check_finite,
    check_grid,
    kind_of,
    labelled_form,
    per_trajectory,
    read_state,
)
from ups.surrogate.coverage import Coverage
from ups.surrogate.family_cards import FamilyCard, with_time_step
from ups.surrogate.surrogate import Setting, condition_of

MAX_REASONS = 3  # in a warning


@dataclass(frozen=True)
class Problem:
    """A batch of B initial-value or steady problems of one family, ready for the models.

    `dataset` has the caller's grid and the operator's time step, and else what a dataset of training has; `u_0`
    (B, C, *grid) is None for steady families, `u_before` the snapshot before it where that was given, `parameters` are
    (B,) each. Models predict on the grid of training. One
    step of `dt` is `substeps` steps of the operator. `form` is that of the caller's arrays.
    """

    card: FamilyCard
    dataset: Dataset
    u_0: Tensor | None
    coefficients: Tensor | None
    parameters: dict[str, Tensor]
    condition: Tensor
    dt: float
    substeps: int
    form: Form
    u_before: Tensor | None = None

    @property
    def batch(self) -> int:
        return len(self.condition)

    def after(self, u_before: Array) -> "Problem":
        """The same problem with the snapshots one step of the operator before its initial states, in their shape.

        Raises:
            ConfigFault: another shape or type, NaN or infinite values, values <= 0 of a positive field.
        """
        family = self.card.family
        try:
            u, _ = read_state(u_before, family, len(family.fields), self.condition.device)
        except ConfigFault as fault:
            raise ConfigFault(str(fault).replace("u_0", "u_before")) from None
        _expect_labels(self.form, {"u_before": u_before})
        if self.u_0 is None or u.shape != self.u_0.shape:
            raise ConfigFault(f"u_before of {self.card.name} must have the shape of u_0")
        return replace(self, u_before=u)

    def setting(self, z_c: Tensor | None, like: Tensor) -> Setting:
        """The setting for states like z (B, N, D); `z_c` (B, N, D_c) are the latents of the coefficients."""
        coefficients = like.new_zeros(self.batch, like.shape[1], 0) if z_c is None else z_c
        return Setting(self.card.name, self.card.domain, coefficients, self.condition)


def pose(
    card: FamilyCard,
    u_0: Array | None,
    arguments: dict[str, Any],
    dt: float | None,
    device: torch.device,
) -> Problem:
    """Check what the caller gave for a family: initial state, parameters and coefficients by name, time step.

    Raises:
        ConfigFault: anything that is missing, unknown, or of another shape than the models take.
    """
    family = card.family
    _check_state(family, u_0)
    arguments = _only_values(card) | _stated(family, u_0) | arguments
    check_arguments(family, arguments)
    u, form = (None, None) if u_0 is None else read_state(u_0, family, len(family.fields), device)
    fields = {name: arguments[name] for name in family.coefficients}
    coefficients, form = read_coefficients(family, fields, u, form, device)
    given = u if u is not None else coefficients
    assert given is not None and form is not None
    _expect_labels(form, arguments)
    grid, batch = tuple(given.shape[2:]), len(given)
    check_grid(grid, family)
    dataset, step, substeps = with_time_step(card, dt)
    parameters = per_trajectory({name: arguments[name] for name in dataset.parameters}, batch, device)
    # The condition is that of the trained grid, on which the models predict.
    features = torch.tensor(condition_features(dataset), dtype=torch.float32, device=device)
    condition = condition_of(features, parameters, batch)
    return Problem(card, replace(dataset, grid=grid), u, coefficients, parameters, condition, step, substeps, form)


def why_outside(problem: Problem, covered: Coverage) -> str | None:
    """Why the error may be far above the usual one, in one line; None inside of what training covered."""
    fields = [None if each is None else each.detach().cpu() for each in (problem.u_0, problem.coefficients)]
    dt = None if problem.u_0 is None else problem.dt / problem.substeps
    parameters = {name: values.detach().cpu() for name, values in problem.parameters.items()}
    found = covered.check(*fields, parameters, grid=problem.dataset.grid, dt=dt)
    if not bool(found.warned.any()):
        return None
    which = "" if problem.batch == 1 else f", {int(found.warned.sum())} of {problem.batch} states"
    return f"{problem.card.name} outside of training{which}: {'; '.join(found.reasons[:MAX_REASONS])}"


def read_ensemble(members: int | None, seed: int) -> tuple[int | None, int]:
    """Size and seed of an ensemble as plain numbers; a `ConfigFault` for a size that none can have, and for no seed."""
    size, start = whole(members), whole(seed)
    if members is not None and (size is None or size < 2 or size % 2):
        raise ConfigFault(f"members must be an even number of at least 2, not {members!r}")
    if start is None or not 0 <= start < 2**63:
        raise ConfigFault(f"seed must be a whole number of at least 0, not {seed!r}")
    return size, start


def read_steps(problem: Problem, steps: int | None) -> int | None:
    """Time steps as a plain number, None for steady families; a `ConfigFault` where that does not suit the family."""
    name, count = problem.card.name, whole(steps)
    if problem.u_0 is None and steps is not None:
        raise ConfigFault(f"{name} is steady and has no time steps: leave out steps")
    if problem.u_0 is not None and (count is None or count < 1):
        raise ConfigFault(f"steps of {name} must be a whole number of at least 1, not {steps!r}")
    return count


def whole(value: Any) -> int | None:
    """A value of any type as a plain whole number; None if it is none, or a truth value."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def check_arguments(family: Family, arguments: dict[str, Any]) -> None:
    """Raise `ConfigFault` unless the arguments are the parameters and coefficients of a family, all of them."""
    needed = (*family.parameters, *family.coefficients)
    for name in arguments:
        if name not in needed:
            raise ConfigFault(f"{family.name} has no parameter {name!r}{nearest(name, needed)}")
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigFault(f"{', '.join(missing)} of {family.name} is missing: give it by name, as {missing[0]}=...")


def _check_state(family: Family, u_0: Array | None) -> None:
    if family.steady and u_0 is not None:
        raise ConfigFault(f"{family.name} is steady and has no initial state: give {' and '.join(family.coefficients)}")
    if not family.steady and u_0 is None:
        raise ConfigFault(f"u_0 is missing: the initial state of {family.name} ({', '.join(family.fields)})")


def _only_values(card: FamilyCard) -> dict[str, float]:
    """The parameters of which training had a single value: the caller may leave them out."""
    values = {name: card.values(name) for name in card.family.parameters}
    return {name: known[0] for name, known in values.items() if len(known) == 1}


def _stated(family: Family, u_0: Array | None) -> dict[str, Any]:
    """The parameters that are coordinates of an initial state, as in results of `predict`, but not its dimensions."""
    if u_0 is None or kind_of(u_0) != "xarray":
        return {}
    return {name: u_0[name].values for name in family.parameters if name in u_0.coords and name not in u_0.dims}


def _expect_labels(form: Form, arguments: dict[str, Any]) -> None:
    """Refuse xarray objects whose labels of trajectories are not those of the initial states, which set the order."""
    if form.batch not in form.coordinates:
        return
    labels = form.coordinates[form.batch].values
    for name, array in arguments.items():
        if kind_of(array) == "xarray" and form.batch in array.dims and form.batch in array.coords:
            own = array[form.batch].values
            if len(own) == len(labels) and not np.array_equal(own, labels):
                what = f"{name} has other labels along {form.batch}, or in another order, than the initial states"
                raise ConfigFault(f"{what}: use {name}.sel({form.batch}=...) with theirs")


def read_coefficients(
    family: Family, fields: dict[str, Array], u: Tensor | None, form: Form | None, device: torch.device
) -> tuple[Tensor | None, Form | None]:
    """Coefficient fields (B, C, *grid) from arrays (*grid) or (B, *grid) by name."""
    if not fields:
        return None, form
    read = [_read_coefficient(family, name, array, device) for name, array in fields.items()]
    tensors = [tensor if tensor.ndim > len(family.axes) else tensor[None] for tensor, _ in read]
    form = form or max(read, key=lambda each: (each[1].batched, len(each[0])))[1]  # that with the most solutions
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors} | ({tuple(u.shape[2:])} if u is not None else set())
    if len(shapes) > 1:
        raise ConfigFault(
            f"u_0 and {', '.join(fields)} must be on the same grid, not on {' and '.join(map(str, shapes))}"
        )
    batch, what = (max(map(len, tensors)), "solutions") if u is None else (len(u), "initial states")
    if any(len(tensor) not in (1, batch) for tensor in tensors):
        raise ConfigFault(f"{', '.join(fields)} must be given once or for each of {batch} {what}")
    return torch.stack([tensor.expand(batch, *tensor.shape[1:]) for tensor in tensors], 1), form


def _read_coefficient(family: Family, name: str, array: Array, device: torch.device) -> tuple[Tensor, Form]:
    """One coefficient field (*grid) or (B, *grid), and the form of results if there is no initial state."""
    num_axes, kind = len(family.axes), kind_of(array)
    if kind == "xarray":
        if hasattr(array, "data_vars"):
            raise ConfigFault(f"{name} of {family.name} must be a DataArray, not a Dataset")
        others = batch_dimensions(array, family, name)
        tensor = as_tensor(array.transpose(*others, *family.axes).values, name, device)
        form = labelled_form(array, family, others, name)
    else:
        tensor = as_tensor(array, name, device)
        place = array.device if kind == "torch" else torch.device("cpu")
        form = Form(kind, tensor.ndim > num_axes, len(family.fields) > 1, place)
    if tensor.ndim not in (num_axes, num_axes + 1):
        grid = ", ".join("XYZ"[:num_axes])
        raise ConfigFault(f"{name} must be ({grid}) or (B, {grid}), but has shape {tuple(tensor.shape)}")
    check_finite(tensor, name)
    if name in family.positive_coefficients and not bool((tensor > 0).all()):
        raise ConfigFault(f"{name} must be > 0; its smallest value is {tensor.min():.3g}")
    return tensor, form
