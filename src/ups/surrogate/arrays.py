"""Arrays of the caller, from numpy, torch or xarray, as tensors (B, C, *grid), and results as the caller's kind."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ups.data.families import Dataset, Family
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault

Kind = Literal["numpy", "torch", "xarray"]
Array = Any
"""numpy.ndarray, torch.Tensor, xarray.DataArray or, with a variable per field, xarray.Dataset."""
RESULT_DIMENSIONS = {"time", "member"}  # of xarray results; not a name for the dimension of trajectories


@dataclass(frozen=True)
class Form:
    """What the caller's arrays look like, so that results look the same.

    `batched`: there is an axis of trajectories, named `batch` in xarray; `channels`: there is an axis of fields.
    `coordinates` are those of the caller's xarray objects.
    """

    kind: Kind
    batched: bool
    channels: bool
    device: torch.device
    batch: str = "trajectory"
    coordinates: dict[str, Any] = field(default_factory=dict)


def find_device(name: str | torch.device | None) -> torch.device:
    """A device by its name; None: a GPU if there is one.

    Raises:
        ConfigFault: torch knows no such device, or this machine has no GPU.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no such devices
        what = str(error).partition("\n")[0]
        raise ConfigFault(f"there is no device {name!r} ({what}): choose cpu, or leave out device") from None


def kind_of(array: Array) -> Kind:
    """The library of an array; lists and numbers count as numpy."""
    if isinstance(array, Tensor):
        return "torch"
    xarray = sys.modules.get("xarray")  # an xarray object exists only if xarray is imported
    return "xarray" if xarray is not None and isinstance(array, xarray.DataArray | xarray.Dataset) else "numpy"


def read_state(array: Array, family: Family, num_fields: int, device: torch.device) -> tuple[Tensor, Form]:
    """An initial state u_0 as (B, C, *grid) float32.

    Accepted are (C, *grid) and (B, C, *grid); without C for families of one field; in xarray a Dataset with a variable
    per field, or a DataArray, whose dimensions are named after the axes of the family and, if there are several fields,
    `field`; one more dimension is that of trajectories.

    Raises:
        ConfigFault: another shape or type, missing fields, NaN or infinite values, values <= 0 of a positive field.
    """
    if kind_of(array) == "xarray":
        u, form = _from_xarray(array, family, device)
    else:
        u, form = _from_plain(array, family, num_fields, device)
    check_finite(u, "u_0")
    check_positive(u, family, "u_0")
    return u, form


def check_grid(grid: tuple[int, ...], family: Family) -> None:
    """Raise `ConfigFault` for an axis without neighbours."""
    if min(grid) < 2:
        raise ConfigFault(f"{family.name} has the grid {grid}: an axis needs at least 2 points")


def check_positive(u: Tensor, family: Family, argument: str) -> None:
    """Raise `ConfigFault` where a field of u (B, C, *grid) has values <= 0 that must be positive."""
    for name, values in zip(family.fields, u.unbind(1), strict=True):
        if name in family.positive and not bool((values > 0).all()):
            what = f"{argument}: {name} of {family.name} must be > 0"
            raise ConfigFault(f"{what}; its smallest value is {values.min():.3g}")


def _from_plain(array: Array, family: Family, num_fields: int, device: torch.device) -> tuple[Tensor, Form]:
    u, num_axes = as_tensor(array, "u_0", device), len(family.axes)
    form = Form(kind_of(array), u.ndim == num_axes + 2, u.ndim > num_axes, _device_of(array))
    if u.ndim == num_axes and num_fields == 1:
        return u[None, None], form
    grid = ", ".join("XYZ"[:num_axes])
    expected = f"({num_fields}, {grid}) or (B, {num_fields}, {grid})" + f" or ({grid})" * (num_fields == 1)
    if u.ndim not in (num_axes + 1, num_axes + 2) or u.shape[-num_axes - 1] != num_fields:
        hint = "; for B states of one field use u_0[:, None]" if u.ndim == num_axes + 1 and num_fields == 1 else ""
        fields = ", ".join(family.fields)
        raise ConfigFault(f"u_0 of {family.name} ({fields}) must be {expected}, but has shape {tuple(u.shape)}{hint}")
    return (u if form.batched else u[None]), form


def _from_xarray(array: Array, family: Family, device: torch.device) -> tuple[Tensor, Form]:
    named = variables(array, family, "u_0")
    others = batch_dimensions(next(iter(named.values())), family, "u_0")
    arrays = [
        as_tensor(values.transpose(*others, *family.axes).values, "u_0", device)
        for values in named.values()
        if batch_dimensions(values, family, "u_0") == others
    ]
    if len(arrays) < len(named):
        raise ConfigFault(f"u_0 of {family.name}: all of {', '.join(named)} must have the same dimensions")
    u = torch.stack(arrays, 1 if others else 0)
    return (u if others else u[None]), labelled_form(array, family, others, "u_0")


def batch_dimensions(array: Array, family: Family, name: str) -> list[str]:
    """The dimension of trajectories of a DataArray, if it has one besides the axes of the family.

    Raises:
        ConfigFault: an axis is missing, or there is more than one other dimension.
    """
    others = [dim for dim in array.dims if dim not in family.axes]
    if len(array.dims) != len(family.axes) + len(others) or len(others) > 1:
        expected, found = ", ".join(family.axes), ", ".join(map(str, array.dims)) or "none"
        what = f"{name} of {family.name} must have the dimensions {expected} and at most one more"
        raise ConfigFault(f"{what}, not {found}")
    if set(others) & {*RESULT_DIMENSIONS, *family.fields}:
        remedy = f"select one, as {name}.isel({others[0]}=0), or rename the dimension of trajectories"
        raise ConfigFault(f"{name} of {family.name} must not have the dimension {others[0]}: {remedy}")
    return others


def labelled_form(array: Array, family: Family, others: list[str], name: str) -> Form:
    """The form of results for an xarray object, `name` in messages, with the dimension `others` of trajectories."""
    check_axes(array, family, name)
    for dim in others:
        levels = set(getattr(array.indexes.get(dim), "names", ())) - {dim}
        if twice := sorted(levels & set(family.parameters)):
            what = f"{name}: the multi-index {dim} has the level {twice[0]}, as a parameter of {family.name} is called"
            raise ConfigFault(f"{what}: use {name}.reset_index({dim!r}, drop=True)")
    coordinates = {str(label): array[label] for label in (*family.axes, *others) if label in array.coords}
    batch = str(others[0]) if others else "trajectory"
    return Form("xarray", bool(others), True, torch.device("cpu"), batch, coordinates)


def check_axes(array: Array, family: Family, name: str) -> None:
    """Raise `ConfigFault` for coordinates of an axis that do not increase in equal steps, as in training."""
    from ups.data.axes import is_uniform  # imports h5py, without which arrays of numpy and torch do

    for axis in family.axes:
        values = array[axis].values if axis in array.coords else np.empty(0)
        if values.dtype.kind in "fiu" and len(values) > 1 and not is_uniform(values.astype(float)):
            remedy = f"use {name}.sortby({axis!r}), or interpolate"
            raise ConfigFault(f"{name}: the coordinates {axis} do not increase in equal steps: {remedy}")


def grid_of(array: Array, family: Family) -> tuple[int, ...]:
    """Points per axis of an array of the caller, as far as it has the axes of the family."""
    if kind_of(array) == "xarray":
        return tuple(array.sizes[axis] for axis in family.axes if axis in array.sizes)
    shape = () if array is None else as_tensor(array, "the input", torch.device("cpu")).shape
    return tuple(shape)[-len(family.axes) :]


def variables(array: Array, family: Family, argument: str) -> dict[str, Any]:
    """The DataArray of each field of an xarray object, named `argument` in messages."""
    import xarray

    if isinstance(array, xarray.DataArray):
        if len(family.fields) == 1 and "field" not in array.dims:
            return {family.fields[0]: array}
        if "field" not in array.dims or array.sizes["field"] != len(family.fields):
            needed = f"a dimension `field` of size {len(family.fields)} ({', '.join(family.fields)})"
            raise ConfigFault(f"{argument} of {family.name} must have {needed}, or be a Dataset")
        stored = _names_of_fields(array)
        if stored is not None and sorted(stored) != sorted(family.fields):
            found, expected = ", ".join(stored), ", ".join(family.fields)
            raise ConfigFault(f"{argument} of {family.name} has the fields {found}, expected {expected}")
        order = stored or list(family.fields)
        return {name: array.isel(field=order.index(name), drop=True) for name in family.fields}
    missing = [name for name in family.fields if name not in array.data_vars]
    if missing:
        found = ", ".join(map(str, array.data_vars)) or "none"
        raise ConfigFault(f"{argument} of {family.name} has no variable {', '.join(missing)}; it has {found}")
    return {name: array[name] for name in family.fields}


def _names_of_fields(array: Array) -> list[str] | None:
    """The names along the dimension `field` of a DataArray; None where it has numbers or nothing."""
    if "field" not in array.coords or array.coords["field"].dtype.kind not in "UOS":
        return None
    return list(map(str, array.coords["field"].values))


def as_tensor(array: Array, name: str, device: torch.device) -> Tensor:
    """Real numbers as float32 on `device`; gradients of a tensor are kept."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(_real_numbers(array, name))
    if tensor.layout != torch.strided:
        raise ConfigFault(f"{name} must be a dense tensor: use {name}.to_dense()")
    if tensor.is_complex():
        raise ConfigFault(f"{name} must hold real numbers, not {tensor.dtype}")
    return tensor.to(device, torch.float32)


def _real_numbers(array: Array, name: str) -> np.ndarray:
    if np.ma.is_masked(array):
        raise ConfigFault(f"{name} has masked values: fill them with numbers")
    try:
        values = np.asarray(array)
    except ValueError:
        raise ConfigFault(f"{name} must be an array, not a list of rows of different lengths") from None
    if values.dtype.kind not in "fiub":
        raise ConfigFault(f"{name} must hold real numbers, not {values.dtype}")
    with np.errstate(over="ignore"):  # too large for float32: infinite, which is refused later
        return np.array(values, dtype=np.float32, order="C")


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise `ConfigFault` where a tensor has no values, or some that are NaN or infinite."""
    if not tensor.numel():
        raise ConfigFault(f"{name} is empty: its shape is {tuple(tensor.shape)}")
    finite = tensor.isfinite()
    if not bool(finite.all()):
        wrong = (~finite).nonzero()
        what = f"{len(wrong)} of {tensor.numel()} values that are NaN, infinite or too large for float32"
        first = f", the first at {wrong[0].tolist()} of shape {list(tensor.shape)}" * (tensor.ndim > 0)
        raise ConfigFault(f"{name} has {what}{first}: remove or repair them")


def _device_of(array: Array) -> torch.device:
    return array.device if isinstance(array, Tensor) else torch.device("cpu")


def as_given(u: Tensor, form: Form) -> Array:
    """A result (B, ..., C, *grid) of numpy or torch as the caller's kind; axes that the input lacked are removed."""
    u = u if form.batched else u[0]
    return u.to(form.device) if form.kind == "torch" else u.detach().cpu().numpy()


def labelled(
    u: Tensor, times: Iterable[float] | None, parameters: dict[str, Tensor], dataset: Dataset, form: Form
) -> Array:
    """A result (B, T, C, *grid), or (B, C, *grid) without `times`, as an xarray.Dataset with a variable per field.

    Coordinates are `time` and, unless the caller's are given, cell centres of a domain that starts at 0, in the units
    of the PDE, and the parameters (B,) of the PDE.
    """
    try:
        import xarray
    except ModuleNotFoundError:
        raise ConfigFault("labels need xarray: `pip install xarray`") from None
    family = FAMILIES[dataset.family]
    coordinates: dict[str, Any] = {
        axis: (np.arange(n) + 0.5) * length / n
        for axis, n, length in zip(family.axes, dataset.grid, dataset.lengths, strict=True)
    }
    if times is not None:
        coordinates["time"] = np.asarray(list(times))
    dims = (*[form.batch] * form.batched, *["time"] * (times is not None), *family.axes)
    channel = u.ndim - len(family.axes) - 1
    values = (u if form.batched else u[0]).detach().cpu()
    fields = values.movedim(channel - (not form.batched), 0).numpy()
    variables = {
        name: (dims, own, {"long_name": family.meanings.get(name, name)})
        for name, own in zip(family.fields, fields, strict=True)
    }
    # Last, because a dimension of trajectories may have the name of a parameter, and other values than were used.
    coordinates |= form.coordinates | {
        name: (form.batch, decimals(known)) if form.batched else decimals(known)[0]
        for name, known in parameters.items()
    }
    return xarray.Dataset(variables, coordinates, {"family": family.name, "equation": family.equation})


def decimals(values: Tensor) -> list[float]:
    """Shortest decimals that round to values (B,) in float32, 0.4 instead of 0.4000000059604645."""
    return [float(str(value)) for value in values.detach().cpu().numpy()]


def per_trajectory(values: Mapping[str, Any], batch: int, device: torch.device) -> dict[str, Tensor]:
    """Parameters as (B,) float32: a number holds for all trajectories.

    Raises:
        ConfigFault: not a number or one number per trajectory, or NaN or infinite.
    """
    tensors = {}
    for name, value in values.items():
        tensor = as_tensor(value, name, device)
        if tensor.ndim > 1 or (tensor.ndim == 1 and len(tensor) != batch):
            shape = tuple(tensor.shape)
            raise ConfigFault(f"{name} must be a number, or one for each of {batch} trajectories, not of shape {shape}")
        check_finite(tensor, name)
        tensors[name] = tensor.expand(batch)
    return tensors
