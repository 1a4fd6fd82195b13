"""Pipeline `data`: from a source of raw files to checked and split datasets with statistics."""

from pathlib import Path

from kedro.pipeline import Pipeline

from ups.config import DownloadConfig, SimulateConfig, SplitConfig, SubsampleConfig
from ups.data.families import Dataset
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.plan import log_plan, make_plan, select
from ups.data.recognition import digests_of
from ups.data.simulated import simulate_files
from ups.data.sources import SUPPLEMENT, Files, download_files, list_files, unchanged
from ups.datasets import pages_in
from ups.errors import ConfigFault
from ups.files import place_of
from ups.pipelines import cached, step
from ups.runs.progress import ProgressBar, TransferBars
from ups.runs.stage_cache import Receipt, code_digest

FILES = ("simulated_files", "downloaded_files", "listed_files")


def create_pipeline() -> Pipeline:
    """Of the three nodes that provide raw files only the one named by `source` works; the others return no files."""
    steps = [
        step(simulate_pdebench, ["params:source", "params:simulate"], "simulated_files"),
        step(download_pdebench, ["params:source", "params:download"], "downloaded_files"),
        step(list_folder, ["params:source"], "listed_files"),
        step(describe_datasets, [*FILES, "params:split", "params:subsample", "params:simulate"], "datasets"),
        step(fit_normalization, ["datasets"], "normalization"),
        step(draw_cards, ["params:source", "datasets", "normalization"], ["data_cards", "data_cards_text"]),
    ]
    return Pipeline(steps, tags="data")


def simulate_pdebench(source: str, config: SimulateConfig, raw: Path) -> Files:
    """Simulate PDEBench's families into files of PDEBench's own layout."""
    if source != "simulate":
        return {}
    if not config.datasets:
        raise ConfigFault("simulate.datasets is empty: name at least one dataset, or another source")
    recipes = [dataset.model_dump() | {"seed": config.seed} for dataset in config.datasets]
    total = sum(dataset.num_trajectories * dataset.num_snapshots for dataset in config.datasets)
    with ProgressBar("simulate", total, "snapshots") as bar:
        return simulate_files(raw, recipes, code_digest("ups.data.simulate"), bar.advance)


def download_pdebench(source: str, config: DownloadConfig, raw: Path) -> Files:
    """Plan and fetch published PDEBench files, or the first trajectories of each, verified by MD5."""
    if source != "pdebench":
        return {}
    place, choice = {"base_url", "parallel"}, {"families", "files"}
    files = select(config.families, config.files, **config.model_dump(exclude=place | choice))
    plan = make_plan(raw, files, config.trajectories)
    log_plan(plan)
    with TransferBars({file.name: file.bytes for file in plan.files}) as bars:
        return download_files(plan, bars.advance, **config.model_dump(include=place))


def list_folder(source: str, raw: Path, data_root: Path) -> Files:
    """Take the files that lie in the user's folder, of PDEBench or of families that they or `families.yml` define."""
    if source != "folder":
        return {}
    files = list_files(raw, data_root / "01_raw" / "checksums.json")
    FAMILIES.write(data_root)
    return files


def describe_datasets(
    simulated: Files,
    downloaded: Files,
    listed: Files,
    config: SplitConfig,
    subsample: SubsampleConfig,
    simulate: SimulateConfig,
    raw: Path,
    data_root: Path,
) -> Receipt:
    """Open and check every file, choose points, snapshots and trajectories; hold some out by initial condition.

    Small training splits are filled up with simulated trajectories.
    """
    files = simulated | downloaded | listed
    families = digests_of(entry["family"] for entry in files.values())
    inputs = {"sources": files, "families": families, "subsample": subsample.of(families)}

    def work(folder: Path) -> Receipt:
        described = {"subsample": inputs["subsample"], **config.model_dump()}
        with unchanged(raw, files, data_root):
            return inputs | inspect("describe", folder=raw, names=sorted(files), **described)

    at = "04_feature/datasets"
    described = cached("describe_datasets", data_root, at, "ups.data.splits", config, inputs)(work)
    return _filled_up(described, simulate, raw, data_root) if simulate.fill_below else described


def _filled_up(described: Receipt, config: SimulateConfig, raw: Path, data_root: Path) -> Receipt:
    """The receipt of the datasets, with simulated trajectories in small training splits."""
    from ups.data.supplement import fill_up, recipes_like  # the solvers need torch

    def work(folder: Path) -> Receipt:
        datasets = {name: Dataset.from_json(entry) for name, entry in described["datasets"].items()}
        with unchanged(raw, described["sources"], data_root):
            return {"recipes": recipes_like(raw, datasets, described["splits"], **fill)}

    fill = config.model_dump(include={"fill_below", "fill_to", "seed"})
    inputs = {"described": described, **fill}
    chosen = cached("choose_supplement", data_root, "04_feature/supplement", "ups.data.supplement", None, inputs)(work)
    if not (recipes := chosen["recipes"]):
        return described
    total = sum(recipe["num_trajectories"] * recipe["num_snapshots"] for recipe in recipes.values())
    folder, identity = data_root / "01_raw" / SUPPLEMENT, code_digest("ups.data.simulate")
    with ProgressBar("simulate", total, "snapshots") as bar:
        filled = fill_up(described, raw, folder, recipes, identity, bar.advance)
    return filled | {"fingerprint": chosen["fingerprint"]}


def fit_normalization(datasets: Receipt, raw: Path, data_root: Path) -> Receipt:
    """Read all values once: refuse what is not finite, take statistics from the training split."""

    def work(folder: Path) -> Receipt:
        described, splits = datasets["datasets"], datasets["splits"]
        total = sum(Dataset.from_json(entry).num_trajectories for entry in described.values())
        with (
            unchanged(raw, datasets["sources"], data_root),
            ProgressBar("fit_normalization", total, "trajectories") as bar,
        ):
            return {"statistics": inspect("fit", bar.advance, folder=raw, datasets=described, splits=splits)}

    module = "ups.data.normalization"
    return cached("fit_normalization", data_root, "04_feature/normalization", module, None, datasets)(work)


def draw_cards(
    source: str, datasets: Receipt, normalization: Receipt, raw: Path, data_root: Path
) -> tuple[dict[str, bytes], str]:
    """Draw one page per dataset: its sizes, statistics and first training trajectory."""

    def work(folder: Path) -> Receipt:
        from ups.data.cards import write_cards

        with (
            unchanged(raw, datasets["sources"], data_root),
            ProgressBar("draw_cards", len(datasets["datasets"]), "datasets") as bar,
        ):
            write_cards(folder, raw, datasets, normalization["statistics"], source, bar.advance)
        return {"datasets": sorted(datasets["datasets"])}

    shown = {name: FAMILIES[name].definition for name in datasets["families"]}  # the digests are without texts
    inputs = {"source": source, "datasets": datasets, "normalization": normalization, "shown": shown}
    receipt = cached("draw_cards", data_root, "04_feature/data_cards", "ups.data.cards", None, inputs)(work)
    place = place_of(data_root, receipt)
    return pages_in(place), (place / "cards.md").read_text(encoding="utf-8")
