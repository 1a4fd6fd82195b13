"""The parameters we ship are valid, and every wrong one is refused by name."""

import copy
import itertools
import math
import pickle
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.config import OmegaConfigLoader
from pydantic import ValidationError

from ups.config import (
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    Parameters,
    SteadyConfig,
    SubsampleConfig,
    Variant,
)
from ups.errors import ConfigFault
from ups.hooks import check_data_root, check_parameters, places
from ups.models.codec import choose_patch
from ups.settings import CONFIG_LOADER_ARGS
from ups.training.stage import batch_size

CONF = Path(__file__).parents[1] / "conf"
NAN, INF = math.nan, math.inf
DATASET = "simulate.datasets.0"


def loader(environment: str, given: dict[str, Any], conf: Path = CONF) -> OmegaConfigLoader:
    """The configuration of an environment as `kedro run --env` reads it, with `given` as `--params`."""
    return OmegaConfigLoader(str(conf), env=environment, runtime_params=given, **CONFIG_LOADER_ARGS)


def load(environment: str, **given: Any) -> dict[str, Any]:
    """The parameters of an environment, merged as `kedro run --env` merges them, and `given` as with `--params`."""
    return dict(loader(environment, given)["parameters"])


def seeds(section: Any) -> list[int]:
    """Every `seed` in a section and the sections within it."""
    if not isinstance(section, dict):
        return []
    return [seed for name, value in section.items() for seed in ([value] if name == "seed" else seeds(value))]


@cache
def base() -> dict[str, Any]:
    """The parameters of `conf/base`."""
    return load("base")


def typed() -> Parameters:
    """The same as sections."""
    return Parameters.model_validate({name: value for name, value in base().items() if not name.startswith("_")})


def changed(name: str, value: Any) -> dict[str, Any]:
    """The base parameters with one of them set, or removed where the value is `...`."""
    parameters = copy.deepcopy(base())
    *place, last = [int(part) if part.isdigit() else part for part in name.split(".")]
    section: Any = parameters
    for part in place:
        section = section[part]
    section.pop(last) if value is ... else section.__setitem__(last, value)
    return parameters


def refusal(parameters: dict[str, Any]) -> str:
    """The one line with which the parameters are refused."""
    with pytest.raises(ConfigFault) as caught:
        check_parameters(parameters)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sections_reach_other_processes():
    """Every section can be pickled, as `kedro run --runner ParallelRunner` does to hand it to a node."""
    assert pickle.loads(pickle.dumps(typed())) == typed()


ENVIRONMENTS = ["base", "smoke", "sample", "pdebench", "accuracy", "conditions", "fine", "unseen", "protocol"]
ENVIRONMENTS += ["protocol_simulated"]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_shipped_parameters_are_valid(environment: str, monkeypatch: pytest.MonkeyPatch):
    """Every environment passes its own check."""
    monkeypatch.setenv("UPS_SAMPLE_DATA", "folder")
    check_parameters(load(environment))


PUBLISHED = [(1024,), (128, 128), (512, 512), (128, 128, 128)]  # grids of PDEBench


def batch_sections(parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every section that says how large batches are in training."""
    stages = {name: section for name, section in parameters.items() if "batch_multiple" in section}
    return stages | {"baselines": parameters["baselines"]["recipe"]}


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_published_data_are_shared_equally_by_gpus(num_processes: int):
    """With `--env pdebench` a batch of any stage and any published grid is divided by 1, 2, 4 or 8 processes."""
    parameters = {n: s for n, s in load("pdebench").items() if isinstance(s, dict) and not n.startswith("_")}
    codec, sections = parameters["codec"]["model"], batch_sections(parameters)
    assert sections.keys() >= {"codec", "operator", "diffusion", "consistency", "steady", "baselines"}
    for grid in PUBLISHED:
        axes = len(grid) - 1
        patch = choose_patch(grid, codec["patch_size"][axes], codec["max_tokens"][axes])
        tokens = math.prod(n // patch for n in grid)
        assert tokens <= 4096
        for section in sections.values():
            assert batch_size(section["batch_tokens"], tokens, section["batch_multiple"]) % num_processes == 0


@pytest.mark.parametrize("environment", ["base", "accuracy"])
def test_one_parameter_seeds_everything(environment: str):
    """`--params seed=3` reaches data, splits, every stage, baselines and evaluation."""
    parameters = load(environment, seed=3)
    assert set(seeds(parameters)) == {3}
    assert {"simulate", "split", "operator", "steady", "evaluation"} <= {n for n, s in parameters.items() if seeds(s)}
    assert set(seeds(load(environment))) == {0}


def test_sample_environment_asks_for_a_folder(monkeypatch: pytest.MonkeyPatch):
    """Without a folder of PDEBench files the environment `sample` says how to name one."""
    monkeypatch.delenv("UPS_SAMPLE_DATA", raising=False)
    assert "--params raw_root=DIR" in refusal(load("sample"))


PLACES = [{}, {"data_root": "elsewhere"}, {"data_root": "elsewhere", "raw_root": "files"}]
WITH_PLACES = list(itertools.product(("base", "sample"), (None, "folder"), PLACES))
OTHERS = [(name, "folder", {}) for name in ENVIRONMENTS if name not in ("base", "sample")]


@pytest.mark.parametrize(("environment", "variable", "given"), WITH_PLACES + OTHERS)
def test_parameters_and_catalog_have_the_same_places(
    environment: str, variable: str | None, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """What is read and written is where the parameters say, in every environment and with `--params`."""
    monkeypatch.delenv("UPS_SAMPLE_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("UPS_SAMPLE_DATA", variable)
    config = loader(environment, given)
    parameters, catalog = config["parameters"], config["catalog"]
    check_data_root(parameters["data_root"], catalog)
    found, variable = places(parameters, Path("/project")), variable if environment == "sample" else None
    assert found["data_root"] == Path("/project", parameters["data_root"])
    assert found["raw_root"] == Path("/project", given.get("raw_root", variable or found["data_root"] / "01_raw"))
    assert catalog["datasets"]["filepath"] == f"{parameters['data_root']}/04_feature/datasets.json"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder of the user's own environment, in a copy of `conf`."""
    return shutil.copytree(CONF, tmp_path / "conf") / "local"


def test_a_data_root_among_the_parameters_is_refused(local: Path):
    """Set in parameters.yml, which the catalog cannot read, it is refused with the remedy; `--params` is stronger."""
    (local / "parameters.yml").write_text(yaml.safe_dump({"data_root": "my/files"}))
    config = loader("local", {}, local.parent)
    with pytest.raises(ConfigFault, match=r"data_root = my/files .* --params data_root=my/files, or in globals.yml"):
        check_data_root(config["parameters"]["data_root"], config["catalog"])
    config = loader("local", {"data_root": "given"}, local.parent)
    check_data_root(config["parameters"]["data_root"], config["catalog"])


def test_raw_files_may_be_set_among_the_parameters(local: Path):
    """A folder of raw files in parameters.yml reaches the nodes, and `--params` is stronger."""
    (local / "parameters.yml").write_text(yaml.safe_dump({"source": "folder", "raw_root": "my/files"}))
    for given, raw in (({}, "my/files"), ({"raw_root": "given"}, "given")):
        parameters = loader("local", given, local.parent)["parameters"]
        assert places(parameters, Path("/project"))["raw_root"] == Path("/project", raw)


def test_globals_set_the_places(local: Path):
    """Both places in globals.yml of an environment reach parameters and catalog, and `--params` is stronger."""
    (local / "globals.yml").write_text(yaml.safe_dump({"data_root": "mine", "raw_root": "my/files"}))
    for given, raw in (({}, "my/files"), ({"raw_root": "given"}, "given")):
        config = loader("local", given, local.parent)
        parameters, catalog = config["parameters"], config["catalog"]
        assert parameters["data_root"] == catalog["latent_cache"]["data_root"] == "mine"
        assert places(parameters, Path("/project"))["raw_root"] == Path("/project", raw)


WRONG = [
    ("source", "internet"),
    ("source", None),
    ("data_root", 3),
    ("raw_root", 3),
    ("simulate.datasets", {}),
    (f"{DATASET}.family", "advection_4d"),
    (f"{DATASET}.parameters", [0.4]),
    (f"{DATASET}.parameters.beta", "fast"),
    (f"{DATASET}.parameters.beta", NAN),
    (f"{DATASET}.num_trajectories", 2),
    (f"{DATASET}.resolution", 4),
    (f"{DATASET}.num_snapshots", 0),
    (f"{DATASET}.duration", 0.0),
    (f"{DATASET}.duration", -INF),
    ("download.families", ["burgers"]),
    ("download.families", "burgers_1d"),
    ("download.files", [1]),
    ("download.parameters", [0.4]),
    ("download.parameters", {"beta": 0.4}),
    ("download.parameters", {"beta": ["fast"]}),
    ("download.kind", "validation"),
    ("download.resolution", 0),
    ("download.files_per_family", -1),
    ("download.max_gigabytes", 0.0),
    ("download.max_gigabytes", INF),
    ("download.trajectories", 2),
    ("download.trajectories", "all"),
    ("download.base_url", "file:///etc"),
    ("download.base_url", "mirror.test"),
    ("download.parallel", 0),
    ("download.parallel", 1000),
    ("subsample.default.every_point", 0),
    ("subsample.default.every_snapshot", 2.0),
    ("subsample.default.first_snapshot", -1),
    ("subsample.default.last_snapshot", 0),
    ("subsample.default.first_trajectories", 2),
    ("subsample.burgers_1d", {"every_point": 0}),
    ("subsample.burgers_1d", {"every_snapshot": None}),
    ("split.valid_fraction", 1.0),
    ("split.test_fraction", 0.0),
    ("split.test_fraction", -0.1),
    ("codec.steps", 0),
    ("codec.model", None),
    ("codec.model.patch_size", [2, 2]),
    ("codec.model.patch_size", 2),
    ("codec.model.max_tokens", [256, 0, 256]),
    ("codec.model.max_tokens", [256, 256, True]),
    ("ablation.steps", 0),
    ("ablation.seeds", []),
    ("baselines.linear.kernel_size", 4),
    ("ablation.variants", {}),
    ("ablation.variants.0.name", "two words"),
    ("ablation.variants.1.overrides", None),
    ("latents.tolerance", 0.001),
    ("latents.tolerance", {}),
    ("latents.tolerance", {"default": 0.0}),
    ("latents.tolerance", {"default": None, "burgers_1d": -1.0}),
    ("operator.model.mixing", "convolution"),
    ("operator.model.levels", 4),
    ("operator.model.head_channels", 15),
    ("operator.model.window", 0),
    ("operator.model.drop_path", 1.0),
    ("operator.model.conditioning", None),
    ("operator.seed", -1),
    ("operator.seed", 0.5),
    ("operator.steps", "many"),
    ("operator.steps", "2000"),
    ("operator.steps", True),
    ("operator.steps", 10.5),
    ("operator.steps", None),
    ("operator.batch_tokens", -4096),
    ("operator.learning_rate", 0),
    ("operator.learning_rate", "0.1"),
    ("operator.learning_rate", NAN),
    ("operator.learning_rate", INF),
    ("operator.learning_rate", True),
    ("operator.batch_multiple", 0),
    ("operator.balance", 1.5),
    ("operator.family_weights_by_dimension", [1.0, 0.0, 1.0]),
    ("operator.family_weights_by_dimension", [1.0, 1.0]),
    ("operator.optimizer", "sgd"),
    ("operator.schedule", "linear"),
    ("operator.spike_factor", 1.0),
    ("operator.max_skipped_steps", -1),
    ("operator.precision", "float16"),
    ("operator.patience", 0),
    ("operator.weight_decay", -0.01),
    ("operator.ema_decay", 1.0),
    ("operator.noise", 0.1),
    ("operator.noise.std", -0.1),
    ("operator.noise.own_error", None),
    ("operator.unroll.horizon", 0),
    ("operator.unroll.start", 1.0),
    ("operator.unroll.pushforward", 1),
    ("operator.terms.query.num_points", 0),
    ("operator.terms.spectral.weight", -0.1),
    ("operator.model.modes", [0, 0, 0]),
    ("diffusion.P_mean", NAN),
    ("diffusion.P_std", 0.0),
    ("codec.precision", "float8"),
    ("baselines.recipe.precision", "bfloat16"),
    ("consistency.precision", "float16"),
    ("diffusion.clip_norm", 0.0),
    ("consistency.q", 1.0),
    ("steady.warmup_steps", -1),
    ("adapt.donor", "burgers"),
    ("adapt.sizes", [1]),
    ("adapt.sizes", [8, 4]),
    ("adapt.valid_fraction", 1.5),
    ("judge.gates.0.method", "operatr"),
    ("protocol.families", {"burger_1d": {}}),
    ("adapt.recipe.schedule", "plateau"),
    ("adapt.folder", ""),
    ("launch.num_processes", 0),
    ("launch.threads_per_process", 0),
    ("launch.num_nodes", 0),
    ("launch.rendezvous", "somewhere"),
    ("launch.sharding", "zero"),
    ("launch.compile", "maybe"),
    ("launch.compile", 1),
    ("launch.deterministic", "mostly"),
    ("launch.micro_batch_tokens", 0),
    ("launch.memory_fraction", 1.0),
    ("launch.checkpoint_steps", 0),
    ("launch.checkpoint_minutes", 0.0),
    ("launch.keep_checkpoints", 0),
    ("launch.restarts", -1),
    ("launch.timeout_seconds", 0),
    ("launch.device", "tpu"),
    ("launch.force", 2),
    ("launch.force", "yes"),
    ("profile.steps", 0),
    ("benchmark.rounds", 0),
    ("benchmark.seconds_per_round", 0.0),
    ("benchmark.datasets", []),
    ("benchmark.loading_datasets.0.family", "advection_4d"),
    ("benchmark.large_model.modes", [0, 0, 0]),
    ("evaluation.folder", ""),
    ("evaluation.folder", 3),
    ("evaluation.ensemble_size", 2),
    ("corrector.ensemble_size", 5),
    ("corrector.num_tokens", 0),
    ("corrector.sigma_min", 0.0),
    ("corrector.sigma_min", 5.0),
    ("corrector.sample", 5.0),
    ("corrector.sample.num_steps", 0),
    ("corrector.refine", [{"sigma": -1.0, "num_steps": 8}]),
    ("corrector.residual_scales", [0.0]),
    ("corrector.noise_correlations", [1.5]),
    ("corrector.max_crps", NAN),
    ("corrector.student.num_steps", [3]),
    ("corrector.student.num_steps", []),
    ("corrector.student.min_wall_time_ratio", 0.0),
    ("seed", -1),
    ("seed", 5),
    ("ablation.variants.0.overrides", {"steps": 9}),
    ("ablation.variants.0.overrides", {"seed": 1}),
    ("seeds.data_roots", ["data", "data/"]),
    ("selection.sampler", "operator"),
    ("selection.sizes", []),
    ("selection.sizes", [8, 4]),
    ("selection.sizes", [1, 2, 4]),
    ("selection.beam.width", 3),
    ("selection.if_corrector_off.sigma", 0.0),
    ("selection.sigma_min", 5.0),
    ("selection.if_corrector_off.num_steps", 3),
    ("shifts.num_trajectories", [12, 6]),
    ("shifts.parameters", [1.0]),
    ("shifts.amplitudes", [0.0]),
    ("shifts.grids", [1]),
    ("judge.gates.0.at_most", INF),
    ("judge.gates.0.horizon", "next"),
    ("judge.gates.0.name", 1),
    ("judge.gates.0.relative_to", "codec"),
    ("judge.gates.0.otherwise", "pass"),
    ("judge.first_trajectories", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_wrong_value_is_refused(name: str, value: Any):
    """A value of the wrong kind or size is refused in one line that names the parameter."""
    line = refusal(changed(name, value))
    assert name in line and not line.startswith("unknown parameter")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("operater", "operator"),
        ("difusion", "diffusion"),
        ("operator.learning_rat", "learning_rate"),
        ("operator.model.hidden_chanels", "hidden_channels"),
        ("launch.num_process", "num_processes"),
        ("subsample.burger_1d", "burgers_1d"),
        ("subsample.default.every_points", "every_point"),
        (f"{DATASET}.num_trajectory", "num_trajectories"),
        ("judge.gates.1.atmost", "at_most"),
        ("adapt.fno.mode", "modes"),
    ],
)
def test_unknown_parameter_is_refused(name: str, near: str):
    """A misspelt section or parameter is refused with the name that was probably meant."""
    assert f"unknown parameter {name}, did you mean {near}?" in refusal(changed(name, 1))


def test_a_family_keeps_the_options_that_it_does_not_override():
    """`subsample.burgers_1d` has the values of `default`, but for those that it lists."""
    default = typed().subsample.default.model_copy(update={"every_point": 2})
    options = SubsampleConfig(default=default, burgers_1d={"every_snapshot": 5}).of(["burgers_1d", "darcy_2d"])
    assert options["darcy_2d"] == default.model_dump()
    assert options["burgers_1d"] == default.model_dump() | {"every_snapshot": 5}


def test_a_family_has_its_own_tolerance():
    """That of a family holds for its variants too, `default` for the others, null keeps a family as float32."""
    tolerance = {"default": 1e-4, "compressible_ns_2d": 1e-3, "darcy_2d": None}
    latents = LatentsConfig(tolerance=tolerance, on_disk=True)
    found = {"burgers_1d": 1e-4, "compressible_ns_2d": 1e-3, "compressible_ns_2d-512x512": 1e-3, "darcy_2d": None}
    assert latents.of(found) == {"tolerance": found, "on_disk": True}
    assert LatentsConfig(tolerance=None, on_disk=False).of(["a"]) == {"tolerance": {"a": None}, "on_disk": False}


def test_a_tolerance_of_an_unknown_family_is_refused():
    """In `latents` and in a variant of `compression`, with the family that was probably meant; a number says how."""
    assert refusal(changed("latents.tolerance", 0.001)).endswith("one for all families is {default: 0.001}, got 0.001")
    for place in ("latents.tolerance", "compression.variants.1.latents"):
        message = refusal(changed(place, {"default": None, "burger_1d": 0.001}))
        assert "unknown parameter latents.tolerance.burger_1d, did you mean burgers_1d?" in message


def test_a_range_without_two_snapshots_is_refused():
    """A last snapshot that leaves one snapshot is refused whether it stands in `default` or is an override."""
    what = "leave fewer than 2 snapshots: raise last_snapshot to 5 or more"
    assert what in refusal(changed("subsample.burgers_1d", {"every_snapshot": 5, "last_snapshot": 4}))
    default = base()["subsample"]["default"] | {"every_snapshot": 5, "last_snapshot": 4}
    assert refusal(changed("subsample.default", default)).count(what) == 1


def test_sections_by_family_know_their_parameters():
    """A family that `protocol` or `subsample` does not list yet has the parameters of those that they list."""
    assert "did you mean every_point?" in refusal(changed("subsample.burgers_1d", {"every_points": 2}))
    assert "did you mean modes?" in refusal(changed("protocol.families", {"darcy_2d": {"mode": [4, 4, 4]}}))


def test_unknown_parameter_without_neighbour_lists_the_known():
    """Where no name is near, all names of the section are given."""
    assert refusal(changed("split.zzz", 1)) == (
        "unknown parameter split.zzz; known: seed, valid_fraction, test_fraction"
    )


@pytest.mark.parametrize("name", ["codec", "operator.steps", "operator.model.modes", f"{DATASET}.family", "raw_root"])
def test_missing_parameter_is_refused(name: str):
    """There are no defaults outside `conf`: what is absent is named."""
    assert f"parameter {name} is missing" in refusal(changed(name, ...))


def test_folder_needs_raw_root():
    """`source: folder` without a folder is refused with the remedy."""
    assert "--params raw_root=DIR" in refusal(changed("source", "folder"))
    check_parameters(changed("source", "folder") | {"raw_root": "somewhere"})


def test_plateau_needs_patience():
    """A schedule that waits for validations is refused where nothing says how many."""
    assert "schedule plateau needs patience" in refusal(changed("operator.schedule", "plateau"))


def test_several_nodes_need_a_rendezvous():
    """More than one node without a place to meet is refused with the remedy."""
    assert "launch.rendezvous=HOST:PORT" in refusal(changed("launch.num_nodes", 2))


def test_held_out_shares_leave_something_to_train_on():
    """Two valid shares that take everything together are refused."""
    parameters = changed("split.valid_fraction", 0.5)
    parameters["split"]["test_fraction"] = 0.5
    assert "split.valid_fraction + split.test_fraction" in refusal(parameters)


def test_all_mistakes_are_told_at_once():
    """Two wrong parameters are both named."""
    parameters = changed("operator.steps", 0)
    parameters["codec"]["steps"] = -1
    assert {"codec.steps", "operator.steps"} <= set(refusal(parameters).split())


@pytest.mark.parametrize(
    ("name", "value"), [("operator.learning_rate", 1), ("launch.threads_per_process", 2), ("diffusion.P_mean", 0)]
)
def test_whole_numbers_are_numbers(name: str, value: Any):
    """Where a number is asked, a whole one will do."""
    check_parameters(changed(name, value))


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"levels": 3}, "num_layers of at least 5"),
        ({"mixing": "attention", "head_channels": 20}, "multiple of head_channels"),
        ({"window": 8}, "window needs mixing: attention"),
    ],
)
def test_choices_of_the_backbone_fit_together(choices: dict[str, Any], reason: str):
    """Options that have no meaning together are refused."""
    assert reason in refusal(changed("operator.model", base()["operator"]["model"] | choices))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"layers": 3}, "variant adamw: layers"),
        ({"model": {"modes": [0, 0, 0]}}, "variant adamw: model.modes"),
        ({"model": {"levels": 3}}, "variant adamw: model: "),
        ({"noise": 0.1}, "variant adamw: noise"),
    ],
)
def test_a_variant_that_is_no_operator_is_refused(overrides: dict[str, Any], reason: str):
    """Overrides of the ablation are checked like the section that they change, before any work."""
    assert reason in refusal(changed("ablation.variants.1.overrides", overrides))


def test_compression_begins_with_what_is_not_compressed():
    """The first variant, with which the others are compared, has no tolerance."""
    rounded = changed("compression.variants.0.latents", {"default": 0.1})
    assert "the first of compression.variants" in refusal(rounded)


def test_rows_of_compression_have_different_names():
    """A copied variant that keeps its name would share a row with the first."""
    parameters = load("base")
    name = parameters["compression"]["variants"][0]["name"]
    twice = changed("compression.variants.1.name", name)
    assert "compression.variants need different names" in refusal(twice)


def test_a_champion_has_errors_of_one_kind():
    """Registered models come with the nRMSE of every trajectory."""
    gates = [gate | {"metric": "VRMSE"} for gate in base()["judge"]["gates"] if gate["relative_to"] == "champion"]
    message = refusal(changed("judge.gates", gates[:1]))
    assert "gate steps_do_not_regress: the champion's trajectories have an nRMSE alone, not VRMSE" in message


def test_the_ablation_has_a_base():
    """Variants have different names, and one of them is what the others are held against."""
    assert "one of them is base" in refusal(changed("ablation.variants.0.name", "flat"))
    assert "need different names" in refusal(changed("ablation.variants.1.name", "base"))


def recipes() -> tuple[OperatorConfig, SteadyConfig]:
    """The sections of our models, of which baselines take noise, symmetries, history and unrolled steps."""
    return typed().operator, typed().steady


@pytest.mark.parametrize(("steps", "between"), [(0, 1), (10, 1), (100, 4), (100_000, 250)])
def test_baselines_validate_early_enough(steps: int, between: int):
    """Noise that follows the model's own error is there in short runs too: validation comes 25 times at least."""
    config = typed().baselines
    section = config.section("unet", "burgers_1d", steps, config.start("unet", "burgers_1d"), *recipes())
    assert (section.steps, section.validate_every, section.model) == (max(1, steps), between, config.unet)
    assert section.model_dump().items() >= config.recipe.model_dump(exclude={"validate_every"}).items()


def test_candidates_change_what_they_name_by_its_factor():
    """Sizes stay integers, one per number of axes; a normalized model has the sizes of its architecture."""
    config = typed().baselines.model_copy(
        update={"factors": {"learning_rate": 3.0, "hidden_channels": 2.0, "modes": 2.0}}
    )
    candidate = {"learning_rate": -1, "modes": 1, "hidden_channels": 0}
    section = config.section("normalized_fno", "burgers_1d", 9, candidate, *recipes())
    assert section.learning_rate == 0.0033
    assert section.model == config.fno.model_copy(update={"modes": tuple(2 * modes for modes in config.fno.modes)})
    assert (section.architecture, section.normalized) == ("fno", True)


def test_overrides_change_only_what_they_name():
    """A variant is the operator's section, inner sections too, but for its overrides, the steps and the seed."""
    parameters = typed()
    variant = Variant(name="any", overrides={"conserve": False, "model": {"modes": [3, 3, 3]}})
    section = parameters.ablation.section(variant, 7, parameters.operator).model_dump()
    expected = parameters.operator.model_dump() | {"conserve": False, "steps": parameters.ablation.steps, "seed": 7}
    assert section == expected | {"model": expected["model"] | {"modes": (3, 3, 3)}}


BAD_MIRRORS = {
    "https://me:SENTINEL@mirror.test/": "user or password",
    "https://SENTINEL@mirror.test": "user or password",
    "https://me:SENT/SENTINEL@mirror.test": "no address",
    "https://me:1#SENTINEL@mirror.test": "***@",
    "https://mirror.test/?token=SENTINEL": "query",
    "https://mirror.test:SENTINEL@/": "user or password",
    "http://mirror.test/": "only https",
    "http://127.1:80/": "only https",
    "http://0x7f000001/": "only https",
    "http://localhost.": "only https",
    "ftp://mirror.test/": "only https",
    "file:///etc": "only https",
    "https://mirror.test\\@a.test/": "user or password",
    "https://mirror.test/\n": "characters",
    "https://": "no host",
}


@pytest.mark.parametrize("address", BAD_MIRRORS)
def test_a_mirror_is_a_plain_encrypted_address(address: str):
    """A mirror over plain http, or with a user, a password or a query, is refused without naming the secret."""
    line = refusal(changed("download.base_url", address))
    assert line.startswith("download.base_url: ") and BAD_MIRRORS[address] in line
    assert "SENT" not in line


@pytest.mark.parametrize(
    "address", ["https://mirror.test/a@b", "http://127.0.0.1:8000", "http://[::1]/", "http://localhost"]
)
def test_mirrors_that_may_be_named(address: str):
    """A mirror over https, or on this machine."""
    check_parameters(changed("download.base_url", address))


ADDRESS = "https://me:SENTINEL@mirror.test"


@pytest.mark.parametrize("name", ["operator.steps", "download.base_url", "simulate.datasets", "launch.device"])
@pytest.mark.parametrize("value", ["${oc.env:UPS_SECRET}", "x${oc.env:UPS_SECRET}", ["${oc.env:UPS_SECRET}"], ADDRESS])
def test_a_wrong_value_of_the_environment_is_masked(name: str, value: Any, local: Path, monkeypatch):
    """A secret under a wrong name or of the wrong type stays in the environment; so does a password in an address."""
    monkeypatch.setenv("UPS_SECRET", "SENTINEL'\\é")
    *sections, last = name.split(".")
    (local / "parameters.yml").write_text(yaml.safe_dump({sections[0]: {last: value}}))
    line = refusal(dict(loader("local", {}, local.parent)["parameters"]))
    assert "SENTINEL" not in line and name in line


def test_a_wrong_default_is_shown(local: Path):
    """What stands in a file is no secret: the line has it."""
    (local / "parameters.yml").write_text(yaml.safe_dump({"operator": {"steps": "${oc.env:UPS_NONE,many}"}}))
    assert "operator.steps = 'many'" in refusal(dict(loader("local", {}, local.parent)["parameters"]))


def test_a_job_has_the_processes_of_all_nodes():
    """Two nodes of four processes are eight ranks; several nodes need a place to meet."""
    launch = base()["launch"] | {"num_processes": 4, "num_nodes": 2}
    assert LaunchConfig(**launch | {"rendezvous": "10.0.0.1:29500"}).world_size == 8
    with pytest.raises(ValidationError, match="several nodes need launch.rendezvous"):
        LaunchConfig(**launch | {"rendezvous": None})


def test_a_place_on_s3_is_checked():
    """Credentials within `raw_root`, and a source that would write there, are refused without showing them."""
    for place, message in (("s3://me:hidden@bucket/raw", "credentials"), ("s3://bucket/raw", "writes raw files")):
        with pytest.raises(ConfigFault, match=message) as caught:
            check_parameters(base() | {"raw_root": place})
        assert "hidden" not in str(caught.value)
    check_parameters(base() | {"raw_root": "s3://bucket/raw", "source": "folder"})


@pytest.mark.parametrize(("stage", "owner"), [("operator", "operator"), ("consistency", "diffusion")])
def test_float8_needs_channels_that_it_can_multiply(stage: str, owner: str):
    """Networks with other channels than multiples of 16 are refused before any work; others are not."""
    parameters = copy.deepcopy(base())
    parameters[stage]["precision"] = "float8"
    check_parameters(parameters)
    parameters[owner]["model"]["hidden_channels"] = [32, 24, 64]
    needed = "precision = float8 needs hidden_channels that are multiples of 16, found [32, 24, 64]: choose bfloat16"
    assert refusal(parameters) in (f"{stage}: {needed}", f"{stage}.{needed}")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("compile", "maybe", "launch.compile: 'maybe' is none of true, false, reduce-overhead"),
        ("compile", None, "launch.compile: None is none of true, false, reduce-overhead"),
        ("nccl", {"NCCL_DEBUGG": "INFO"}, "launch.nccl: unknown variable NCCL_DEBUGG, did you mean NCCL_DEBUG?"),
        ("nccl", {7: "INFO"}, "launch.nccl: unknown variable 7; known: NCCL_ALGO, "),
        (
            "nccl",
            {"NCCL_DEBUG": "a b"},
            "launch.nccl: NCCL_DEBUG = 'a b': use only letters, digits and _^=,.:/-, at least one",
        ),
    ],
)
def test_switches_of_training_are_refused_in_the_words_of_the_user(name: str, value: Any, told: str):
    """A wrong value is one sentence with the parameter, the value and what is allowed, without types of Python."""
    assert refusal(changed(f"launch.{name}", value)).startswith(told)


def test_the_store_of_latents_is_on_s3():
    """Credentials in its address are refused without showing them, and so is a folder on disk."""
    for place in ("s3://me:hidden@bucket/latents", "/shared/latents", "s3://", "https://me:hidden@host/bucket"):
        with pytest.raises(ConfigFault, match="launch.latent_store: a place on S3 is s3://BUCKET/FOLDER") as caught:
            check_parameters(changed("launch.latent_store", place))
        assert "hidden" not in str(caught.value)
    check_parameters(changed("launch.latent_store", "s3://bucket/team_a/latents"))
