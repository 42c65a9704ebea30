"""Job files and programs of the pages on Slurm, Kubernetes, TPU pods and Ray: syntax, fields, commands, and their effect."""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

import jdist
from jdist._src.command_line.main import VERBS

ROOT = pathlib.Path(jdist.__file__).parent.parent
PAGES = ["slurm", "kubernetes", "tpu_pod", "ray"]


def text_of(page):
    return (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), flags=re.DOTALL)


def program(page, name):
    return next(code for code in blocks(page, "python") if code.startswith(f"# {name}\n"))


def manifest(name):
    return list(
        yaml.safe_load_all(next(text for text in blocks("kubernetes", "yaml") if text.startswith(f"# {name}\n")))
    )


@pytest.mark.parametrize("page", PAGES)
def test_shell_blocks_have_valid_syntax(page):
    scripts = blocks(page, "sh")
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + script


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_jdist_exist(page):
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ") + "\n".join(re.findall(r"`([^`\n]+)`", text_of(page)))
    commands = re.findall(r"\bjdist ([a-z]+)((?: [-\w:./]+)*)", text)
    assert commands
    for verb, arguments in commands:
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        VERBS[verb].add_arguments(parser)
        if arguments:  # of a command in the text, possibly without its program
            parser.parse_args(shlex.split(arguments) + ["train.py"] * (verb == "run" and ".py" not in arguments))


BATCH_SCRIPT = next(script for script in blocks("slurm", "sh") if script.startswith("#!"))


def test_batch_script_has_the_lines_that_a_requeued_job_needs():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", BATCH_SCRIPT, flags=re.MULTILINE))
    assert len(options) == len(re.findall("^#SBATCH", BATCH_SCRIPT, flags=re.MULTILINE))
    assert (options["requeue"], options["open-mode"], options["ntasks-per-node"]) == ("", "append", "1")
    assert re.fullmatch(r"TERM@\d+", options["signal"])


@pytest.mark.parametrize("status, requeues", [(0, False), (1, False), (42, True), (43, False), (143, False)])
def test_batch_script_requeues_after_a_saved_checkpoint_only(status, requeues):
    """The status of `jdist` after a saved checkpoint is 42; `srun` and `scontrol` are functions of the shell."""
    commands = f"srun() {{ return {status}; }}\nscontrol() {{ echo scontrol $*; }}\nexport SLURM_JOB_ID=7\n"
    done = subprocess.run(["bash", "-c", commands + BATCH_SCRIPT], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout == ("scontrol requeue 7\n" if requeues else "")


def pod_environment(template, index):
    (container,) = template["spec"]["containers"]
    constants = {item["name"]: item["value"] for item in container["env"]}
    return constants | {"JOB_COMPLETION_INDEX": str(index)}


def test_pods_of_the_job_find_each_other(tmp_path):
    service, job = manifest("job.yaml")
    template = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    hosts = tmp_path / "hosts"
    for index in range(job["spec"]["completions"]):
        name = f"{job['metadata']['name']}-{index}"
        hosts.write_text(f"10.0.0.{index}\t{name}.{template['spec']['subdomain']}.default.svc.cluster.local\t{name}\n")
        environment = pod_environment(template, index) | {"HOSTNAME": name}
        resolver = jdist.cluster.KubernetesClusterResolver(environ=environment, hosts_file=str(hosts))
        assert (resolver.num_processes, resolver.process_id) == (job["spec"]["completions"], index)
        assert resolver.master() == "train-0.train.default.svc.cluster.local:8476"
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in template["spec"]["volumes"]}


def test_jobset_starts_all_pods_again_after_one_failure():
    (jobset,) = manifest("jobset.yaml")
    (job,) = (replicated["template"]["spec"] for replicated in jobset["spec"]["replicatedJobs"])
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert job["completions"] == job["parallelism"] == int(pod_environment(job["template"], 0)["JOB_COMPLETIONS"])


def test_variables_of_several_jobs_are_the_ones_that_the_resolver_reads():
    (fragment,) = manifest("replicas.yaml")
    names = [item["name"] for item in fragment["env"]]
    environment = dict.fromkeys(names, "2") | {"JOB_COMPLETION_INDEX": "1", "JOBSET_JOB_INDEX": "1"}
    resolver = jdist.cluster.KubernetesClusterResolver(environ=environment, coordinator_address="first:8476")
    assert (resolver.num_processes, resolver.process_id) == (4, 3)


def test_chips_of_the_tpu_pods_are_the_topology():
    (template,) = manifest("tpu.yaml")
    (container,) = template["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    topology = template["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    environment = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "3", "TPU_TOPOLOGY": topology}
    resolver = jdist.cluster.TPUClusterResolver(environ=environment)
    assert (resolver.chips_per_process, resolver.num_processes, resolver.process_id) == (chips, 4, 3)


def run(folder, name, code, *command):
    (folder / name).write_text(code, encoding="utf-8")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "jdist_tools", *command, name]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_program_of_slurm_trains_in_two_processes(tmp_path):
    run(tmp_path, "train.py", program("slurm", "train.py"), "run", "-n", "2")
    assert len((tmp_path / "run/log.jsonl").read_text().splitlines()) == 20
    assert (tmp_path / "run/checkpoints/1280").is_dir()


@pytest.mark.slow
def test_program_of_the_tpu_page_trains_on_cpu_devices(tmp_path):
    code = program("tpu_pod", "train.py")
    changes = {
        "jdist.TPUStrategy(jdist.cluster.TPUClusterResolver())": "jdist.MirroredStrategy()",
        "gs://my-bucket/run": "run",
    }
    for line, replacement in changes.items():
        assert code.count(line) == 1
        code = code.replace(line, replacement)
    run(tmp_path, "train.py", code, "run", "-n", "1")
    assert (tmp_path / "run/400").is_dir()


@pytest.mark.slow
def test_plan_of_the_tpu_page_fits(tmp_path):
    pytest.importorskip("libtpu")
    printed = run(tmp_path, "train_plan.py", program("tpu_pod", "train_plan.py"), "plan")
    assert re.search(r"^16 +v5e:4x4 +TPUStrategy +16 +yes", printed, flags=re.MULTILINE)
