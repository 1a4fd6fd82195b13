"""`ups.load` and what it returns: trained models that predict solutions from arrays in physical units."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ups.diffusion import antithetic
from ups.errors import ConfigFault, DataFault
from ups.models.codec import group_name
from ups.models.grid import resampled
from ups.surrogate import bundle
from ups.surrogate.arrays import Array, find_device
from ups.surrogate.coverage import Coverage
from ups.surrogate.family_cards import FamilyCard, find_family, first_coefficient
from ups.surrogate.problem import (
    Problem,
    pose,
    read_ensemble,
    read_steps,
    whole,
    why_outside,
)
from ups.surrogate.results import (
    NO_ENSEMBLES,
    Description,
    Ensemble,
    card_text,
    describe,
    families_with_history,
    result_of,
    snapshot_of,
    stacked,
)
from ups.surrogate.surrogate import NoisyStep, Surrogate, in_float32, rollout_steps

MAX_TOKENS = 2**15  # that the models take at once: about 800 MB of memory
CORRECTORS = ("consistency", "diffusion")  # the first that is on makes ensembles: one or two evaluations per step

if TYPE_CHECKING:
    from ups.data.families import Family


class OutsideTraining(UserWarning):
    """A prediction was asked for outside of what training covered: its error may be far above the usual one."""


class Model:
    """Trained models of several families. Make one with `ups.load`.

    Arrays are in physical units: numpy, torch or xarray in, the same kind out. Tensors keep gradients, so that a
    result can be differentiated by the initial state, the coefficients and the parameters.
    """

    def __init__(self, loaded: bundle.Bundle, device: torch.device) -> None:
        self._bundle = loaded
        self._device = device
        families = loaded.card["families"]
        self.cards = {name: FamilyCard.of(name, entry) for name, entry in families.items()}
        covered = {name: entry["coverage"] for name, entry in families.items() if entry["coverage"] is not None}
        self._coverage = {name: Coverage.from_json(content) for name, content in covered.items()}

    @property
    def families(self) -> tuple[str, ...]:
        """Names of the families that the models can predict."""
        return tuple(self.cards)

    @property
    def card(self) -> dict[str, Any]:
        """Data, settings and scores of the models as plain values; `ups.surrogate.bundle.Bundle` says which."""
        return self._bundle.card

    @property
    def surrogate(self) -> Surrogate:
        """The networks, for work on latents."""
        return self._bundle.surrogate

    def describe(self, family: str) -> Description:
        """Fields, grid, time step, trained parameters and scores of a family."""
        name = find_family(family, self.cards, None)
        return describe(self.cards[name], self._bundle.card, self._corrector(name) is not None)

    def predict(
        self,
        family: str,
        u_0: Array | None = None,
        *,
        u_before: Array | None = None,
        steps: int | None = None,
        members: int | None = None,
        seed: int = 0,
        dt: float | None = None,
        labels: bool = False,
        **parameters: Any,
    ) -> Any:
        """Trajectories from initial states, or solutions of a steady family.

        Args:
            family: one of `families`.
            u_0: initial states (C, *grid) or (B, C, *grid); (*grid) if there is one field. None for steady families. On
                another grid than that of training they are resampled to it, and the result back.
            u_before: the snapshots one time step of training before `u_0`, in the same shape, for a family whose steps
                start from two (`describe` says so); None: the initial states are at rest.
            steps: time steps to predict.
            members: size of an ensemble, even; None: one prediction without samples.
            seed: of the ensemble's noise.
            dt: time between snapshots in units of the PDE; None: that of training. Multiples of it take several steps.
            labels: return an xarray.Dataset with names and coordinates, whatever the kind of the input.
            **parameters: parameters of the PDE by name, a number or (B,); those of which training had a single value
                may be left out; coefficient fields by name, (*grid) or (B, *grid).

        Returns:
            u (steps + 1, C, *grid) or (B, steps + 1, C, *grid) with the initial state first, without C if `u_0` had
            none; steady families have no axis of time. With `members` an `Ensemble`.

        Raises:
            ConfigFault: an argument is missing, unknown or does not suit the models; the message says what is expected.
        """
        problem = self.pose(family, u_0, dt, parameters, u_before)
        members, seed = read_ensemble(members, seed)
        steps = read_steps(problem, steps)
        self.warn_outside(problem)
        parts = list(self.advance(problem, 1 if steps is None else steps, members, seed))
        u = parts[0] if problem.u_0 is None else torch.stack(parts, 2)  # (M, B, [T + 1,] C, *grid)
        results = [result_of(member, problem, steps, labels) for member in u]
        return results[0] if members is None else Ensemble(stacked(results))

    def rollout(
        self,
        family: str,
        u_0: Array,
        *,
        u_before: Array | None = None,
        steps: int,
        dt: float | None = None,
        **parameters: Any,
    ) -> Iterator[Array]:
        """The predicted snapshots one after the other, each of the shape of `u_0`, in memory that `steps` do not raise.

        Arguments are those of `predict`, which returns the same snapshots at once and the initial state before them.
        """
        problem = self.pose(family, u_0, dt, parameters, u_before)
        if problem.u_0 is None:
            raise ConfigFault(f"{problem.card.name} is steady and has no snapshots: use predict")
        num_steps = read_steps(problem, steps)
        assert num_steps is not None
        self.warn_outside(problem)
        return self._snapshots(problem, num_steps)

    def save(self, folder: str | Path) -> None:
        """Write the models as a bundle: a folder that `ups.load` reads with torch, numpy and safetensors alone."""
        bundle.save(self._bundle, Path(folder), card_text(self._bundle.card, self.cards))

    def export(
        self, family: str, path: str | Path, form: Literal["pt2", "onnx", "aoti"] = "pt2", *, dt: float | None = None
    ) -> None:
        """Write one family's model, codec included and without corrector, as a file that runs without this package.

        Its inputs are those of `ups.surrogate.export.PhysicalModel`, for batches of any size: the state u
        (B, C, *grid), the coefficients, and each parameter of the PDE (B,). `dt` is that of `predict`. Raises as
        `physical_model` and `export` there.
        """
        from ups.surrogate.export import export, physical_model

        card = self.cards[find_family(family, self.cards, None)]
        with torch.autocast(self._device.type, enabled=False):
            export(physical_model(self.surrogate, card, dt), Path(path), form)

    def adapt(
        self,
        family: "str | Family",
        u: Array,
        *,
        steps: int,
        dt: float | None = None,
        lengths: tuple[float, ...] | None = None,
        **parameters: Any,
    ) -> "Model":
        """A model of one family that has learned from a few trajectories, starting from these models.

        Args:
            family: one of `families`, where `parameters` or grid are new, or a `ups.Family` that is not among them.
            u: trajectories (B, T, C, *grid), or solutions (B, C, *grid) of a steady family; B at least 2. Dimensions of
                xarray are taken by name: `time`, the axes, `field` or a variable per field; one more of trajectories.
            steps: of training.
            dt: time between snapshots; None: that of the trained family.
            lengths: of the domain along each axis; None: those of the trained family.
            **parameters: of the PDE, a number each; coefficient fields (B, *grid) by name.

        Returns:
            The model; its `card` says what it gained over training from random weights.

        Raises:
            ConfigFault: an argument is missing or does not suit the family.
            DataFault: there are fewer than two trajectories.
            Diverged: no learning rate gives finite errors.
        """
        from ups.training.adapted_model import adapt_bundle  # imports the configuration

        num_steps = whole(steps)
        if num_steps is None or num_steps < 1:
            raise ConfigFault(f"steps of training must be a whole number of at least 1, not {steps!r}")
        about = {"dt": dt, "lengths": lengths, "arguments": parameters}
        with torch.autocast(self._device.type, enabled=False):
            adapted = adapt_bundle(self._bundle, family, u, steps=num_steps, device=self._device, **about)
        return Model(adapted, self._device)

    def _snapshots(self, problem: Problem, steps: int) -> Iterator[Array]:
        for step, u in enumerate(self.advance(problem, steps, None, 0)):
            if step > 0:  # not the initial state
                yield snapshot_of(u[0], problem, step)

    def pose(
        self, family: str, u_0: Array | None, dt: float | None, arguments: dict[str, Any], u_before: Array | None = None
    ) -> Problem:
        """What `predict` is asked for, checked; `arguments` are parameters and coefficients by name.

        Raises:
            ConfigFault: as `predict`.
        """
        given = first_coefficient(family, self.cards, arguments) if u_0 is None else u_0
        card = self.cards[find_family(family, self.cards, given)]
        problem = pose(card, u_0, arguments, dt, self._device)
        if u_before is not None and not self.has_history(card.name):
            raise ConfigFault(f"steps of {card.name} start from one snapshot: leave out u_before")
        if u_before is not None:
            problem = problem.after(u_before)
        return problem

    def has_history(self, name: str) -> bool:
        """Whether steps of a family, with its full name, start from two snapshots."""
        return name in families_with_history(self._bundle.card)

    def warn_outside(self, problem: Problem) -> None:
        """Warn with `OutsideTraining` where a problem lies outside of what training covered, if that was measured."""
        covered = self._coverage.get(problem.card.name)
        if covered is not None and (outside := why_outside(problem, covered)) is not None:
            warnings.warn(outside, OutsideTraining, stacklevel=3)

    def advance(self, problem: Problem, steps: int, members: int | None, seed: int) -> Iterator[Tensor]:
        """Snapshots (M, B, C, *grid), from the initial state on; of steady families the solution alone."""
        return in_float32(self._advance(problem, steps, members, seed), self._device)

    def _advance(self, problem: Problem, steps: int, members: int | None, seed: int) -> Iterator[Tensor]:
        name, grid, boundary, count = problem.card.name, problem.card.grid, problem.dataset.boundary, members or 1
        surrogate = replace(self.surrogate, max_tokens=MAX_TOKENS)
        z_c = None
        if problem.coefficients is not None:
            z_c = surrogate.encode(resampled(problem.coefficients, grid, boundary), name, "coefficients")
        if problem.u_0 is not None:
            yield problem.u_0.expand(count, *problem.u_0.shape)
            snapshots = [problem.u_0] if problem.u_before is None else [problem.u_0, problem.u_before]
            z = torch.cat([surrogate.encode(resampled(u, grid, boundary), name) for u in snapshots], -1)
        else:
            group = surrogate.codec.groups[group_name(name, "fields")]
            z = problem.condition.new_zeros(problem.batch, group.num_tokens, group.num_channels)
        setting = problem.setting(z_c, z).repeated(count)
        step = surrogate.plain_step(setting) if members is None else self._noisy_step(surrogate, name, setting, seed)
        states = islice(rollout_steps(step, z.repeat(count, 1, 1)), steps * problem.substeps)
        for z in islice(states, problem.substeps - 1, None, problem.substeps):
            u = surrogate.decode(z, name).unflatten(0, (count, -1))
            yield resampled(u, problem.dataset.grid, boundary)

    def _corrector(self, family: str) -> str | None:
        corrections = self.surrogate.corrections
        return next((method for method in CORRECTORS if (method, family) in corrections), None)

    def corrector_of(self, family: str) -> str:
        """The method that samples ensembles of a family; a `ConfigFault` where there is none."""
        if (method := self._corrector(family)) is not None:
            return method
        able = [name for name in self.families if self._corrector(name)]
        what = f"no ensembles of {family}: {NO_ENSEMBLES}"
        raise ConfigFault(f"{what}; leave out members, or choose {', '.join(able) if able else 'another model'}")

    def _noisy_step(self, surrogate: Surrogate, family: str, setting: Any, seed: int) -> NoisyStep:
        method = self.corrector_of(family)
        make = surrogate.diffusion_step if method == "diffusion" else surrogate.consistency_step
        normal = antithetic(torch.Generator(self._device).manual_seed(seed))
        return make(setting, surrogate.corrections[method, family], normal)


def load(place: str | Path, *, device: str | torch.device | None = None) -> Model:
    """Trained models from a data root or a bundle folder; `ups.load` takes models of MLflow as well."""
    if not isinstance(place, str | Path):
        raise ConfigFault(f"name a data root or a bundle by its path, not {place!r}")
    place, device = Path(place), find_device(device)
    if not place.is_dir():
        raise DataFault(f"{place} is no folder: name a data root or a bundle")
    read = bundle.read if (place / bundle.CARD).is_file() else bundle.from_data_root
    with torch.inference_mode(False):  # models made within that mode could not be used outside of it
        return Model(read(place, device), device)
