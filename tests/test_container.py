"""The container image: what its file promises of order, versions, rights and secrets."""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """Instruction and argument of every line of the Containerfile, with continued lines joined."""
    text = (PROJECT / "Containerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines) if word]


def place(word: str, pattern: str) -> int:
    """The position of the only instruction of a kind whose argument has the pattern."""
    (found,) = [i for i, (kind, rest) in enumerate(instructions()) if kind == word and re.search(pattern, rest)]
    return found


def test_the_base_and_packages_are_pinned():
    """The base has a version to the last digit, packages of the system a version, those of Python a hash."""
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    assert re.search(r":\d+\.\d+\.\d+-[a-z-]+$|@sha256:[0-9a-f]{64}$", arguments["BASE"])
    stages = {rest.split(" AS ")[-1] for word, rest in instructions() if word == "FROM" and " AS " in rest}
    bases = [rest.split(" AS ")[0] for word, rest in instructions() if word == "FROM"]
    assert {"${BASE}", "base", "${DEVICE}"} == set(bases) and {"base", "cpu", "cuda"} == stages
    for word, rest in instructions():
        if word == "RUN" and "apt-get install" in rest:
            packages = rest.partition("apt-get install")[2].split("&&")[0].split()
            assert all("=" in package for package in packages if not package.startswith("--"))
        if word == "RUN" and "pip install" in rest and "--editable" not in rest:
            assert "--require-hashes" in rest and "--no-deps" in rest


def test_a_change_of_the_code_installs_no_packages():
    """Packages are installed in layers before the code is copied; after it nothing needs a network."""
    code = place("COPY", r"^src ")
    assert place("RUN", "requirements-cuda.txt") < code and place("RUN", r"--requirement requirements.txt$") < code
    after = [rest for word, rest in instructions()[code:] if word == "RUN"]
    assert after and all("--no-index" in rest and "--no-build-isolation" in rest for rest in after)


def test_the_image_runs_without_rights():
    """The last user is a number that is not root's, which Kubernetes asks for."""
    user = [rest for word, rest in instructions() if word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert place("USER", ".") > place("RUN", "--editable")


def test_the_image_has_no_secrets():
    """Nothing but the code and the shipped configuration is copied, and no variable holds a secret."""
    copied = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*" and "conf/local/*" in ignored[ignored.index("!conf") :]
    assert {f"!{source}" for source in copied} <= set(ignored)
    assert not [rest for word, rest in instructions() if word in ("ENV", "ARG") and re.search("TOKEN|KEY|PASS", rest)]
