"""The score of `mutmut run`, and the mutants that no test has killed with a verdict each: the end of `make mutants`."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MIN_KILLED_PERCENT = 85
COLUMNS = ("function", "code", "mutant", "verdict")

Change = tuple[str, str, str]  # the function, and its changed lines before and after


def write_survivors(folder: Path, stats: dict[str, int], changes: Iterable[Change]) -> str | None:
    """Write score.json and survivors.csv, which keeps its verdicts of equal changes; return the remedy if not passed.

    A mutant that survives is either equivalent to the code, and its verdict says why, or shows that a test is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "survivors.csv"
    rows = list(csv.reader(table.read_text(encoding="utf-8").splitlines())) if table.is_file() else []
    verdicts = {tuple(before): verdict for *before, verdict in rows}
    survivors = [(*change, verdicts.get(change, "")) for change in changes]
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *survivors])
    score = {"killed_percent": round(100 * stats["killed"] / stats["total"], 1), **stats}
    (folder / "score.json").write_text(json.dumps(score, indent=2) + "\n", encoding="utf-8")
    if score["killed_percent"] < MIN_KILLED_PERCENT:
        return f"{score['killed_percent']} % of the mutants are killed, {MIN_KILLED_PERCENT} % are needed: write tests"
    if without := [name for name, *_, verdict in survivors if not verdict]:
        return (
            f"{table}: write a verdict, or a test that kills it, for {len(without)} mutants: {', '.join(without[:3])}"
        )
    return None


def changed_lines(diff: str) -> tuple[str, str]:
    """The removed and the added code of a unified diff."""
    lines = diff.splitlines()[2:]
    before, after = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return " ".join(before), " ".join(after)


def survivors() -> Iterator[Change]:
    """All mutants of the last run that were not killed."""
    from mutmut.mutation.data import SourceFileMutationData  # only `make mutants` installs it
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    for path in sorted(walk_mutatable_files()):
        mutants = SourceFileMutationData(path=path)
        mutants.load()
        for name, exit_code in mutants.exit_code_by_key.items():
            if status_by_exit_code[exit_code] != "killed":
                function, owner = orig_function_and_class_names_from_key(name)
                qualified = f"{name.rpartition('.')[0]}.{f'{owner}.' if owner else ''}{function}"
                yield qualified, *changed_lines(get_diff_for_mutant(name, path=path))


if __name__ == "__main__":
    stats = json.loads(Path("mutants/mutmut-cicd-stats.json").read_text(encoding="utf-8"))
    sys.exit(write_survivors(Path("data/published/mutants"), stats, survivors()))
