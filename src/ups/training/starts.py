"""Networks of one family from which an adaptation starts: the family's own, that of a donor, or random weights."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ups.config.studies import AdaptConfig
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault
from ups.metrics.errors import nRMSE
from ups.models.baselines import grid_model
from ups.models.codec import Codec, FieldGroup, group_name
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Sizes, common_inputs, row_of
from ups.surrogate.surrogate import Setting, Surrogate, rollout
from ups.training.examples import Examples, Trajectories, encode, fit_codec, measure_statistics, renormalized
from ups.training.inputs import MOST_STEPS, fit_constraints, fit_persistence
from ups.training.symmetry import conserved_direction

LIMITS, UNITS = ("max_mean", "max_fluctuation", "max_growth", "max_rms"), ("fluctuation_rms", "step_rms", "change_law")
TRUNK = "mixer.trunks."
DONOR_SHARE = 0.5  # of the trained weights of another equation in a start, the rest is random

Model = Operator | SteadyModel


@dataclass(frozen=True)
class Start:
    """A model of one family before its training, its codec, and the constructor arguments that are saved with it.

    `donor` is the family whose network it was; None: all its weights are random. With `solves_head` its last linear map
    is solved for the examples before training (`ups.training.adaptation.solve_head`).
    """

    codec: Codec
    model: nn.Module
    settings: dict[str, Any]
    donor: str | None
    solves_head: bool = False


def surrogate_of(codec: Codec, model: nn.Module, family: str) -> Surrogate:
    """A surrogate with a model of one family as its operator, or as its steady model."""
    steady = FAMILIES[family].steady
    return Surrogate(codec, None if steady else model, None, None, model if steady else None, {})


@torch.no_grad()
def rollout_error(codec: Codec, model: nn.Module, trajectories: Trajectories) -> float:
    """The nRMSE of rollouts, mean over trajectories, fields and times after the first."""
    family, examples = trajectories.family, encode(codec, trajectories)
    surrogate = surrogate_of(codec.on_grid(family.name, trajectories.dataset.grid), model, family.name)
    condition = examples.condition.expand(len(examples.z), -1)
    step = surrogate.plain_step(Setting(family.name, examples.domain, examples.coefficients, condition))
    z_0 = torch.zeros_like(examples.z[:, 0]) if family.steady else examples.z[:, 0]
    u = surrogate.decode(rollout(step, z_0, examples.num_steps), family.name)
    u_ref = trajectories.u if family.steady else trajectories.u[:, 1:]
    return nRMSE(u, u_ref).mean().item()


def is_known(surrogate: Surrogate, dataset: Dataset) -> bool:
    """Whether a surrogate can predict a dataset: it was trained on the family, and its patch divides the grid."""
    model, group = surrogate.model(dataset.family), surrogate.codec.groups.get(group_name(dataset.family, "fields"))
    trained = model is not None and dataset.family in model.rows
    return trained and group is not None and all(n % group.patch == 0 for n in dataset.grid)


def starts(surrogate: Surrogate, trajectories: Trajectories, config: AdaptConfig) -> list[Start]:
    """The family's own network if the surrogate can predict the dataset, else one per donor; and one of random weights.

    Donors are the families with as many axes, the own one too where its patch does not divide the grid. `config.donor`
    may name one, then without random weights beside it, or be `other` although the family is known. The new network has
    a codec of its own and the donor's weights, as far as its fields have counterparts. Those of another equation are
    shrunk towards random weights w, to a w_donor + (1 - a) w with a = `DONOR_SHARE`: further training from trained
    weights often ends at larger errors than from random ones (Ash and Adams 2020, arXiv:1910.08475). Weights of the
    same equation are kept, and are there twice, the second time with their head solved before training.

    Raises:
        ConfigFault: there is no donor, or no trained model.
    """
    family, plain = trajectories.family.name, scratch(surrogate, trajectories, config)
    donors = donors_of(surrogate, trajectories.dataset, config.donor)
    trained = [] if donors else _with_both_heads(_known(surrogate, trajectories, config.recipe.seed))
    for name, model in donors.items():
        start = replace(plain, model=_with_network(plain.model, model, name), donor=name)
        trained += _with_both_heads([start]) if name == family else [_shrunk(start, plain)]
    return trained if config.donor in (family, *donors) else [*trained, plain]


def donors_of(surrogate: Surrogate, dataset: Dataset, donor: str | None) -> dict[str, Model]:
    """The models, by family, whose networks a dataset starts from; none if it starts from its own.

    Of families that share one trunk there is only one, if possible the dataset's own.

    Raises:
        ConfigFault: `donor` is a family, or `other`, whose networks do not fit the dataset.
    """
    if is_known(surrogate, dataset) and donor in (None, dataset.family):
        return {}
    fitting = _donors(surrogate, dataset)
    allowed = [name for name in fitting if donor in (None, name) or (donor == "other" and name != dataset.family)]
    if not allowed:
        known = ", ".join(fitting) or "none"
        raise ConfigFault(f"adapt.donor = {donor} does not fit {dataset.name}; trained networks that do: {known}")
    if not _model_like(surrogate, dataset.family).backbone.separate_trunks:
        allowed = [dataset.family] if dataset.family in allowed else allowed[:1]
    return {name: fitting[name] for name in allowed}


def scratch(surrogate: Surrogate, trajectories: Trajectories, config: AdaptConfig) -> Start:
    """A network of the surrogate's kind with random weights, and a codec that the trajectories normalize."""
    group = _group_like(surrogate, trajectories.dataset)
    codec = fit_codec(trajectories, patch_size=group.patch, components=group.components)
    return _random(surrogate, codec, trajectories, config.recipe.seed)


def fno_scratch(surrogate: Surrogate, trajectories: Trajectories, config: AdaptConfig) -> Start:
    """A Fourier neural operator on the grid with random weights; steps start from as many snapshots as ours."""
    assert config.fno is not None
    codec, family = fit_codec(trajectories, patch_size=1, components=1), trajectories.family
    examples = encode(codec, trajectories)
    settings = {
        "kind": "fno",
        "normalized": False,
        "steady": family.steady,
        "family": family.name,
        "in_channels": len(family.coefficients) + (0 if family.steady else len(family.fields)),
        "out_channels": len(family.fields),
        "grid": examples.domain.grid,
        "periodic": examples.domain.periodic,
        "condition_channels": [],  # all trajectories have one condition
        "history": family.name in _model_like(surrogate, family.name).sizes.history,
        "model": config.fno.model_dump(),
    }
    with torch.random.fork_rng():
        torch.manual_seed(config.recipe.seed)
        model = grid_model(**settings)
    measure_statistics(model.statistics, examples)
    return Start(codec, model.to(trajectories.u.device), settings, None)


def _with_both_heads(found: list[Start]) -> list[Start]:
    return [*found, *(replace(start, solves_head=True) for start in found)]


def _known(surrogate: Surrogate, trajectories: Trajectories, seed: int) -> list[Start]:
    """The family's own weights, with limits that the new trajectories widen, in two systems of units.

    The units of states and of their changes are those of the trained data or of the new ones; solutions of a steady
    family are normalized anew instead.
    """
    family, trained = trajectories.family, surrogate.codec
    source, candidates = surrogate.model(family.name), []
    assert source is not None
    new = (renormalized(trained, trajectories), ()) if family.steady else (trained, UNITS)
    for codec, units in ((trained, ()), new):
        start = _random(surrogate, codec, trajectories, seed)
        measured = copy.deepcopy(start.model)
        _copy_row(start.model, source, row_of(source.rows, family.name), start.model.state_dict())
        if isinstance(start.model, Operator):  # the boundary may be another than in the trained data
            start.model.conserved.mul_(measured.conserved != 0)
            if units:
                start.model.persistence.load_state_dict(measured.persistence.state_dict())
            for own, found in zip(start.model.constraints, measured.constraints, strict=True):
                if own.is_on[0]:
                    own.load_state_dict(found.state_dict())
        statistics, measured = start.model.statistics, measured.statistics
        for limit in LIMITS:
            getattr(statistics, limit).copy_(getattr(measured, limit).maximum(getattr(statistics, limit)))
        for unit in units:
            getattr(statistics, unit).copy_(getattr(measured, unit))
        candidates.append(replace(start, donor=family.name))
    return candidates


def _random(surrogate: Surrogate, codec: Codec, trajectories: Trajectories, seed: int) -> Start:
    """A network of the surrogate's kind, with random weights and the statistics of the trajectories."""
    examples, family, dataset = encode(codec, trajectories), trajectories.family, trajectories.dataset
    like = _model_like(surrogate, family.name)
    # A trunk that all families share has the axes of the family with the most.
    num_axes = len(dataset.grid) if like.backbone.separate_trunks else max(like.sizes.num_axes)
    sizes = Sizes(
        families=[family.name],
        num_axes=[num_axes],
        num_fields=[len(family.fields)],
        latent_channels=[examples.z.shape[-1]],
        coefficient_channels=[examples.coefficients.shape[-1]],
        num_conditions=len(examples.condition),
        history=[name for name in like.sizes.history if name == family.name],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (SteadyModel if family.steady else Operator)(sizes, like.backbone)
    measure_statistics(model.statistics, examples)
    if isinstance(model, Operator):
        model.conserved[0] = conserved_direction(family.name, [dataset.boundary], codec)
        model.statistics.fit_change_law(_some_steps(examples), examples.domain)
        fit_persistence(model, codec, examples.domain, _some_steps(examples))
        fit_constraints(model.constraints, codec, examples.domain, _some_steps(examples))
    settings = {"sizes": asdict(sizes), "backbone": asdict(model.backbone)}
    return Start(codec, model.to(trajectories.u.device), settings, None)


def _some_steps(examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
    """Time steps z -> z_next on the CPU, each (B, N, D), at most `MOST_STEPS` in all."""
    total = len(examples.z) * examples.num_steps
    for part in torch.linspace(0, total - 1, min(total, MOST_STEPS)).long().split(16):
        i, t = part // examples.num_steps, part % examples.num_steps
        yield examples.z[i, t].cpu(), examples.z[i, t + 1].cpu()


def _model_like(surrogate: Surrogate, family: str) -> Model:
    """The surrogate's model of the kind that predicts the family, or if it has none its other one."""
    model = surrogate.model(family) or surrogate.operator or surrogate.steady
    if model is None:
        raise ConfigFault("adapting needs a trained operator or steady model: run `kedro run --pipeline training`")
    return model


def _donors(surrogate: Surrogate, dataset: Dataset) -> dict[str, Model]:
    """The models, by family, whose trunk of that family has the dataset's number of axes and fits into its network."""
    backbone, num_axes = _model_like(surrogate, dataset.family).backbone, len(dataset.grid)
    models = [model for model in (surrogate.operator, surrogate.steady) if model is not None]
    return {
        family: model
        for model in models
        for family, row in model.rows.items()
        if model.sizes.num_axes[row] == num_axes and model.backbone == backbone
    }


def _group_like(surrogate: Surrogate, dataset: Dataset) -> FieldGroup:
    """The codec's group of the family, or of any other with as many axes; its patch suits the trained trunks."""
    groups, num_axes = surrogate.codec.groups, len(dataset.grid)
    alike = [group for group in groups.values() if len(group.grid) == num_axes]
    if not alike:
        what = f"no trained family has {num_axes} axes, as {dataset.name} has"
        raise ConfigFault(f"{what}: adapt models of a family on grids with as many")
    return groups.get(group_name(dataset.family, "fields")) or max(alike, key=lambda group: group.num_tokens)


def _with_network(model: Model, source: Model, family: str) -> Model:
    """A copy of a model of one family with the trunk, head and stem that `source` has for `family`.

    Fields correspond by their order. What only one of the two has keeps its random weights, as do the inputs of
    coefficients of another equation, and the stem where one model is an operator and the other a steady model.
    """
    changed, row = copy.deepcopy(model), row_of(source.rows, family)
    names = [name for name in changed.state_dict() if name.startswith("mixer.")]
    inputs = ("mixer.stem.weights.0", "mixer.summary.weights.0")
    _copy_row(changed, source, row, [name for name in names if name not in inputs])
    if isinstance(model, SteadyModel) and isinstance(source, SteadyModel):
        _copy_row(changed, source, row, inputs)
    if isinstance(model, Operator) and isinstance(source, Operator):
        stem, summary = changed.mixer.stem.weights[0], changed.mixer.summary.weights[0]
        trained_stem, trained_summary = source.mixer.stem.weights[row], source.mixer.summary.weights[row]
        with torch.no_grad():
            for number, (into, of) in enumerate(common_inputs(model.sizes, source.sizes, row)):
                stem[into] = trained_stem[of, : stem.shape[1]]
                if number < 2:  # means and amplitudes
                    summary[into] = trained_summary[of, : summary.shape[1]]
    return changed


@torch.no_grad()
def _shrunk(start: Start, random: Start) -> Start:
    """The start with its weights moved towards those of `random`, to the share `DONOR_SHARE` of their own."""
    model = copy.deepcopy(start.model)
    torch._foreach_lerp_(list(model.parameters()), list(random.model.parameters()), 1 - DONOR_SHARE)
    return replace(start, model=model)


@torch.no_grad()
def _copy_row(model: Model, source: Model, row: int, names: Iterable[str]) -> None:
    """Copy into tensors `names` of a model of one family what `source` has in `row`, as far as both have entries.

    Tensors of `source` may be larger: all its families have the size of the largest, and surplus entries are unused.
    """
    found, tensors, buffers = source.state_dict(), model.state_dict(), dict(model.named_buffers())
    for name in names:
        of_family = re.sub(r"(weights|biases|trunks)\.0", rf"\1.{row}", name, count=1)
        shared = name.startswith(TRUNK) and not source.backbone.separate_trunks
        values = found[name][row : row + 1] if name in buffers else found[name if shared else of_family]
        part = values[tuple(map(slice, tensors[name].shape))]
        tensors[name][tuple(map(slice, part.shape))] = part
    model.load_state_dict(tensors)
