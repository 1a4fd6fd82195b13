"""Jobs for clusters and clouds: each file is what its tool expects, and asks for what the parameters say."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from pydantic import ValidationError

from ups.commands import main
from ups.config import LaunchConfig, SubmitConfig, packaged
from ups.errors import ConfigFault
from ups.runs.submission import TARGETS, Job, hourly_price

PROJECT = Path(__file__).parents[2]
CLEAN = Path("/projects/ups")  # without the conf/local that a user of this one may have
CLOUDS = ("sky", "dstack", "k8s", "trainjob")
LARGE = {"accelerator": "H100", "num_processes": 8, "cores": 64, "memory_gigabytes": 512, "disk_gigabytes": 1000}
CLOUD = {"image": "registry.example/ups:1.0", "storage": "my-storage", "hours": 12.0}
BUCKET = "s3://results"
SECRET = {"secrets": ["MY_TOKEN"], "setup": ["module load cuda"]}


def job(project: Path = CLEAN, num_processes: int = 1, params: str = "", **submit: Any) -> Job:
    """A job of `kedro run --pipeline full` with the options of `conf/base` and these."""
    config = SubmitConfig.model_validate(packaged("submit") | submit)
    launch = LaunchConfig.model_validate(packaged("launch") | {"num_processes": num_processes})
    words = ("kedro", "run", "--env", "local", "--pipeline", "full")
    return Job(words, params, project, Path("/disk/results"), config, launch)


def rendered(target: str, **options: Any) -> Any:
    """The task file of a cloud, read."""
    return yaml.safe_load(job(**(CLOUD | options)).render(target))


def shell_of(target: str, task: dict[str, Any]) -> str:
    """The commands that a task runs."""
    if target == "k8s":
        return task["spec"]["template"]["spec"]["containers"][0]["args"][0]
    if target == "trainjob":
        return task["spec"]["trainer"]["args"][0]
    return task["run"] if target == "sky" else "\n".join(task["commands"])


def pod_of(task: dict[str, Any]) -> dict[str, Any]:
    """What a TrainJob changes of the pods of its runtime."""
    (patch,) = task["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]["template"]["spec"]


def resources(target: str, task: dict[str, Any]) -> dict[str, Any]:
    """GPUs, cores, memory and disk that a task asks for, as text."""
    if target in ("k8s", "trainjob"):
        pod = pod_of(task) if target == "trainjob" else task["spec"]["template"]["spec"]
        names = ("cpu", "memory", "ephemeral-storage")
        container = (
            task["spec"]["trainer"]["resourcesPerNode"] if target == "trainjob" else pod["containers"][0]["resources"]
        )
        found = container["limits"]
        gpu = f"{pod['nodeSelector']['nvidia.com/gpu.product']}:{found['nvidia.com/gpu']}"
    else:
        found = task["resources"]
        sky = target == "sky"
        names = ("cpus", "memory", "disk_size") if sky else ("cpu", "memory", "disk")
        gpu = found["accelerators" if sky else "gpu"]
    return {"gpu": gpu, "sizes": [int("".join(filter(str.isdigit, str(found[name])))) for name in names]}


@pytest.mark.parametrize("target", CLOUDS)
def test_clouds_are_asked_for_what_the_parameters_say(target: str):
    """GPUs, cores, memory and disk are those of `submit` and `launch`."""
    assert resources(target, rendered(target, **LARGE)) == {"gpu": "H100:8", "sizes": [64, 512, 1000]}


@pytest.mark.parametrize("target", CLOUDS)
def test_clouds_keep_results_and_end_machines(target: str):
    """The data root, which has MLflow's files too, is on the storage; a time limit ends the job."""
    task = rendered(target, **LARGE, params="operator.steps=9")
    shell = shell_of(target, task)
    assert "--params launch.device=cuda,operator.steps=9,data_root=/results/ups" in shell
    text = job(**CLOUD, **LARGE).render(target)
    assert "my-storage" in text and "/results" in text
    limits = {"sky": "timeout --foreground --kill-after=120 720m", "dstack": "max_duration: 720m"}
    assert limits.get(target, "activeDeadlineSeconds: 43200") in text


def test_interruptions_resume():
    """Each target starts a run again that was interrupted, which ends it with exit code 75, and no wrong one."""
    assert rendered("sky")["resources"]["use_spot"] and not rendered("sky", spot=False)["resources"]["use_spot"]
    assert rendered("sky")["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert rendered("sky")["resources"]["autostop"]["down"] is True
    assert (rendered("dstack")["spot_policy"], rendered("dstack", spot=False)["spot_policy"]) == ("spot", "on-demand")
    assert rendered("dstack")["retry"]["on_events"] == ["no-capacity", "interruption"]
    rules = rendered("k8s")["spec"]["podFailurePolicy"]["rules"]
    assert {(rule["action"], *rule["onExitCodes"]["values"]) for rule in rules[1:]} == {
        ("Ignore", 75),
        ("FailJob", 2, 3, 4, 5, 6, 7),
    }


@pytest.mark.parametrize("target", TARGETS)
def test_secrets_are_named_and_never_written(target: str, monkeypatch: pytest.MonkeyPatch):
    """A file has the name of the environment variable, and not its value."""
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    text = job(**CLOUD, **SECRET).render(target)
    assert "MY_TOKEN" in text and "very-secret" not in text and "module load cuda" in text


def test_slurm_is_asked_for_what_the_parameters_say(tmp_path: Path):
    """The options of sbatch are those of `submit` and `launch`."""
    script = job(**LARGE, nodes=2, hours=1.5, num_seeds=3, sbatch_options=["--partition=gpu"]).render("slurm")
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    asked = {"--nodes=2", "--gpus-per-node=H100:8", "--cpus-per-task=64", "--mem=512G", "--time=90", "--array=0-2"}
    assert options >= asked | {"--partition=gpu", "--requeue", "--signal=B:TERM@120", f"--chdir={CLEAN}"}
    assert "ups agent --data-root" in script and "launch.num_nodes=2" in script
    assert "agent" not in job().render("slurm") and "--gpus" not in job().render("slurm")


@pytest.mark.parametrize("options", [{}, LARGE | SECRET | {"nodes": 2, "num_seeds": 2, "params": "a='$(b)'"}])
def test_slurm_scripts_are_bash(options: dict[str, Any], tmp_path: Path):
    """Every variant of the script is parsed by bash, and by shellcheck without a warning if that is here."""
    path = tmp_path / "job.sh"
    path.write_text(job(**options).render("slurm"))
    for command in (["bash", "-n"], ["shellcheck", "--severity=warning"]):
        if shutil.which(command[0]):
            ended = subprocess.run([*command, path], capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_first_node_runs_and_the_others_wait_for_it(tmp_path: Path):
    """With several nodes srun starts the run as process 0 and an agent as process 1, with quotes intact."""
    fakes = {"scontrol": "echo node-a; echo node-b", "kedro": 'printf "%s|" kedro "$@"', "ups": 'printf "%s|" ups "$@"'}
    srun = 'while [[ $1 == -* ]]; do shift; done; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; echo; done'
    for name, text in (fakes | {"srun": srun}).items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    before, found, after = job(nodes=2, params="name=$(date) x").render("slurm").partition("run=(")
    script = f'{before}PATH={tmp_path}:"$PATH"\n{found}{after}'
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=True).stdout
    first, second = shown.splitlines()
    params = "name=$(date) x,data_root=/disk/results,launch.num_nodes=2,launch.rendezvous=node-a:20007"
    assert first == f"kedro|run|--env|local|--pipeline|full|--params|{params}|"
    assert second.startswith("ups|agent|--data-root|/disk/results|")


def test_skypilot_reads_its_task():
    """SkyPilot's own parser takes the task."""
    task = pytest.importorskip("sky").Task
    config = rendered("sky", **LARGE, storage=BUCKET)
    parsed = task.from_yaml_config(config)
    (asked,) = parsed.resources
    assert (asked.accelerators, asked.use_spot, asked.disk_size) == ({"H100": 8}, True, 1000)
    assert str(parsed.storage_mounts["/results"].mode.value) == "MOUNT_CACHED"


def test_dstack_reads_its_task():
    """The parser of dstack takes the task."""
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    parsed = configurations.parse_run_configuration(rendered("dstack", **LARGE, storage="results", **SECRET))
    assert (parsed.resources.gpu.count.min, parsed.resources.gpu.name) == (8, ["H100"])
    assert (parsed.volumes[0].name, parsed.volumes[0].path) == ("results", "/results")
    assert parsed.max_duration == 12 * 3600 and parsed.stop_duration == 120


@pytest.mark.parametrize("options", [{}, LARGE | SECRET])
def test_kubernetes_reads_its_job(options: dict[str, Any]):
    """The manifest keeps Kubernetes' own schema, in which a misspelt name is an error."""
    validator = pytest.importorskip("kubernetes_validate")
    manifest = rendered("k8s", **options, storage="results")
    assert validator.validate(manifest, validator.latest_version(), strict=True)


@pytest.mark.parametrize("options", [{}, LARGE | SECRET | {"nodes": 2}])
def test_kubeflow_reads_its_job(options: dict[str, Any]):
    """Kubeflow's own classes take the manifest and give it back whole: they drop a name that they do not know."""
    kubeflow = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = rendered("trainjob", **options, storage="results")
    assert kubeflow.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


def test_the_nodes_of_a_train_job_find_each_other(tmp_path: Path):
    """Of two nodes the first runs, the second has an agent, and no option of torchrun is left to either."""
    task = rendered("trainjob", nodes=2, params="name=$(date) x")
    shell = shell_of("trainjob", task).replace("/results", str(tmp_path))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("kedro", "ups"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s|" {name} "$@" "$PET_NNODES"\n')
        (programs / name).chmod(0o755)
    known = {"PET_NNODES": "2", "PET_MASTER_ADDR": "a-0.a", "PET_MASTER_PORT": "29400"}
    variables = known | {"PATH": f"{programs}:/usr/bin:/bin"}
    shown = [
        subprocess.run(["bash", "-c", shell], env=variables | {"PET_NODE_RANK": rank}, capture_output=True, check=True)
        for rank in "01"
    ]
    params = f"name=$(date) x,data_root={tmp_path}/ups,launch.num_nodes=2,launch.rendezvous=a-0.a:29400"
    assert shown[0].stdout.decode() == f"kedro|run|--env|local|--pipeline|full|--params|{params}||"
    assert shown[1].stdout.decode() == f"ups|agent|--data-root|{tmp_path}/ups||"


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("pbs", {}, "there is no target 'pbs'; known: slurm, sky, dstack, k8s, trainjob"),
        ("slrum", {}, "did you mean slurm?"),
        ("sky", {}, "submit.storage is missing, which sky needs"),
        ("k8s", {"storage": "a"}, "submit.image is missing, which k8s needs"),
        ("sky", {"storage": "a", "nodes": 2}, "submit.nodes = 2 is for slurm and trainjob only"),
        ("sky", {"storage": "a", "num_seeds": 2}, "submit.num_seeds = 2 is for slurm only"),
        (
            "k8s",
            CLOUD | {"storage": BUCKET},
            "submit.storage = s3://results is no name of a PersistentVolumeClaim, which k8s needs",
        ),
        ("trainjob", CLOUD | {"num_seeds": 2}, "submit.num_seeds = 2 is for slurm only"),
        ("slurm", {"num_processes": 8}, "submit.cores = 2 is less than launch.num_processes = 8"),
    ],
)
def test_what_a_target_cannot_do_is_one_line(target: str, options: dict[str, Any], message: str):
    """The parameter is named before anything is submitted."""
    with pytest.raises(ConfigFault, match=message.replace("?", r"\?")):
        job(**options).render(target)


def test_slurm_takes_no_data_root_with_a_comma():
    """Each job would fail: Kedro splits its parameters there, whatever is quoted."""
    with pytest.raises(ConfigFault, match="/disk/a,b: --params is split at the comma"):
        replace(job(), data_root=Path("/disk/a,b")).render("slurm")


def test_what_only_this_machine_has_is_not_left_out(tmp_path: Path):
    """Parameters of conf/local, which is neither in an image nor copied, are refused for a cloud, but for `submit`."""
    (tmp_path / "conf" / "local").mkdir(parents=True)
    path = tmp_path / "conf" / "local" / "parameters.yml"
    path.write_text("submit: {setup: [module load cuda]}\n")
    assert job(tmp_path, **CLOUD).render("sky")
    path.write_text("operator: {steps: 9}\n")
    assert job(tmp_path).render("slurm")
    with pytest.raises(ConfigFault, match=r"parameters.yml is not copied to the machines of sky: move"):
        job(tmp_path, **CLOUD).render("sky")
    for name in ("parameters.yaml", "parameters/operator.json"):  # Kedro reads these as well
        (tmp_path / "conf/local" / name).parent.mkdir(exist_ok=True)
        path = path.rename(tmp_path / "conf/local" / name)
        path.write_text('{"operator": {"steps": 9}}')
        with pytest.raises(ConfigFault, match=rf"{name} is not copied to the machines of sky: move"):
            job(tmp_path, **CLOUD).render("sky")


WRONG = [
    ("name", "Ups run"),
    ("name", "ups-"),
    ("hours", 0.0),
    ("nodes", 0),
    ("accelerator", "H100; rm"),
    ("cores", 1.5),
]
WRONG += [("secrets", ["TOKEN=value"]), ("image", "a b"), ("sbatch_options", ["partition=gpu"]), ("num_seeds", 0)]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_wrong_options_are_refused(option: str, value: Any):
    """No option can have a value that is none, or that adds to a script."""
    with pytest.raises(ValidationError, match=option):
        job(**{option: value})


def test_the_price_is_that_of_the_catalog(tmp_path: Path):
    """The lowest price of as many GPUs, or none, on a machine that is large enough, spot or not; None without one."""
    assert hourly_price(job(**LARGE).submit, job(**LARGE).launch, tmp_path) is None
    rows = [
        "AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice",
        "H100,8.0,96.0,1024.0,30.5,12.5",
        "H100,8.0,64.0,512.0,40,11.5",
        "H100,8.0,32.0,512.0,20,1.5",  # too few cores
        "H100,8.0,,,10,1",  # of the GPUs alone
        "H100,1.0,64.0,512.0,4,2",
        ",,2.0,4.0,0.05,0.01",  # too little memory
        ",,2.0,8.0,0.1,",  # never spot
        ",,4.0,16.0,0.2,0.06",
    ]
    (tmp_path / "v8" / "aws").mkdir(parents=True)
    (tmp_path / "v8" / "aws" / "vms.csv").write_text("\n".join(rows))
    for options, prices in ((LARGE, {True: 11.5, False: 30.5}), ({}, {True: 0.06, False: 0.1})):
        for spot, price in prices.items():
            asked = job(**options, spot=spot)
            assert hourly_price(asked.submit, asked.launch, tmp_path) == price


def launch(*arguments: str) -> Result:
    """The result of `ups launch ARGUMENTS --env smoke` in the folder of the project."""
    return CliRunner().invoke(main, ["launch", *arguments, "--env", "smoke"])


def test_the_command_shows_the_job(monkeypatch: pytest.MonkeyPatch):
    """`--dry-run` prints the file alone; parameters of the run reach it, those of the job become its options."""
    monkeypatch.chdir(PROJECT)
    given = "submit.storage=s3://results,submit.hours=2.0,operator.steps=9"
    shown = launch("--on", "sky", "--dry-run", "--pipeline", "full", "--params", given)
    assert shown.exit_code == 0, shown.output
    task = yaml.safe_load(shown.stdout)
    assert "--env smoke --pipeline full --params operator.steps=9,data_root=/results/ups" in task["run"]
    assert "submit." not in task["run"] and " 120m " in task["run"]
    assert "`sky jobs launch` shows it" in shown.stderr or shown.stderr.startswith("price: from ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "slurm", "--params", "submit.nods=2"], "unknown parameter submit.nods, did you mean nodes?"),
        (["--on", "slurm", "--params", "submit.hours=soon"], "parameter submit.hours = 'soon'"),
        (["--on", "slurm", "--params", "download.families=[a,b]"], "write lists of several items into conf/local"),
        (["--on", "slurm", "--pipeline", "ful"], "there is no pipeline 'ful', did you mean full?"),
        (["--on", "pbs"], "there is no target 'pbs'"),
        ([], "Missing option '--on'"),
    ],
)
def test_mistakes_of_the_command_are_one_line(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    """A wrong option, parameter, pipeline or target has exit code 2 and one line with the remedy."""
    monkeypatch.chdir(PROJECT)
    ended = launch(*arguments, "--dry-run")
    assert ended.exit_code == 2 and message in ended.output and ended.output.count("\n") == 1, ended.output


def test_outside_of_a_project_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a configuration there is no job."""
    monkeypatch.chdir(tmp_path)
    assert "has no conf/base: start this command in the folder of the project" in launch("--on", "slurm").output


def test_a_missing_program_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where a target's own command is not installed, the line says how to get the file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigFault, match="sbatch is not installed here; `--dry-run`"):
        job(PROJECT).submit_to("slurm")


def test_the_file_is_given_to_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The target's own command gets the rendered file, and its refusal is one line."""
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\ncat "$1" > {tmp_path}/got\nexit "$(cat {tmp_path}/code)"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "code").write_text("0")
    job(PROJECT).submit_to("slurm")
    assert (tmp_path / "got").read_text() == job(PROJECT).render("slurm")
    (tmp_path / "code").write_text("1")
    with pytest.raises(ConfigFault, match="sbatch refused the job with exit code 1"):
        job(PROJECT).submit_to("slurm")
