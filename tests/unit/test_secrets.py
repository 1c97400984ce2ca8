"""What has a secret's name is masked wherever others can read it, and there for the run and its owner."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from harness.in_process import jobkit
from harness.other_user import as_nobody, only_root, open_folder
from harness.project import Project

from jobkit.run import overrides, secrets
from jobkit.run.config import Config
from jobkit.run.experiment import load
from jobkit.run.identity import run_name
from jobkit.run.rundir import RunDir
from jobkit.run.secrets import MASK, is_secret, masked
from jobkit.run.yamlfile import read_yaml
from jobkit.submission import sbatch
from jobkit.submission.plan import make_plan
from jobkit.worker.results import flat

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    ["token", "hf_token", "HF_TOKEN", "apiKey", "API-key", "WANDB_API_KEY", "db.password", "APIKey", "aws_secret_id"]
    + ["apikey", "WANDB_APIKEY", "HFTOKEN", "authtoken", "accesskey", "secretkey", "hf_tokens", "passphrase", "DB_PASS"]
    + ["pwd", "dbpassword", "hfToken", "api_keys", "sshPrivateKey", "AWSSECRETACCESSKEY", "Proxy-Authorization"]
    + ["passwd", "credential", "myCredentials", "AwsSecretAccessKey", "params.hf_token"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "monkey",
        "keyboard",
        "wckey",
        "keep",
        "lr",
        "",
        "secretary",
        "num_tokens",
        "new_tokens",
    ]
    + ["n_key", "num_keys", "key_dim", "maxToken", "n_tokens", "special_tokens", "forward_pass", "passes", "PWD"]
    + ["tokens_per_step", "author", "keypoints", "turkey"],
)
def test_other_names(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"token": "abc", "lr": 1, "name": "x"}, {"token": MASK, "lr": 1, "name": "x"}),
        ({"a": [{"apiKey": "abc"}]}, {"a": [{"apiKey": MASK}]}),
        ({"credentials": {"user": "eve", "ids": ["a", 1]}}, {"credentials": {"user": MASK, "ids": [MASK, 1]}}),
        ({"key": 3, "token": None, "secret": True, "password": ""}, None),
        (["python", "train.py", "--token=abc", "HF_TOKEN=abc", "--lr=1"], None),
        (["train", "--hf-token", "abc", "-v", "--token", "--other"], None),
        (["export HF_TOKEN='a b' && run"], [f"export HF_TOKEN={MASK} && run"]),
        ({"export": "ALL,HF_TOKEN=ab,cd,LR=1"}, {"export": f"ALL,HF_TOKEN={MASK},LR=1"}),
        ("--export=HF_TOKEN=abc", f"--export=HF_TOKEN={MASK}"),
        ('export A="x" KEY="a\\" b"c; echo', f'export A="x" KEY={MASK}; echo'),
        ("lr=1 tokenizer=gpt2", "lr=1 tokenizer=gpt2"),
        (["--token", "-abc", "-v"], ["--token", MASK, "-v"]),
        (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
        ("train --token -abc --lr 1", f"train --token {MASK} --lr 1"),
        ('curl -H "Authorization: Bearer abc" x', f'curl -H "Authorization: {MASK}" x'),
        ("curl -H 'X-Api-Key: abc' -H 'Accept-Language: de'", f"curl -H 'X-Api-Key: {MASK}' -H 'Accept-Language: de'"),
        ("git clone https://eve:ghp_abc@host/x", f"git clone https://eve:{MASK}@host/x"),
        ("git clone https://eve@host:22/x ssh://h:22/a@b", "git clone https://eve@host:22/x ssh://h:22/a@b"),
        ("setenv HF_TOKEN abc; setenv A b", f"setenv HF_TOKEN {MASK}; setenv A b"),
        ("The key: it is a well-known one", "The key: it is a well-known one"),
        ("train --max-tokens 512 --n-key 8", "train --max-tokens 512 --n-key 8"),
    ],
)
def test_what_is_masked(value: Any, shown: Any) -> None:
    found = masked(value)
    assert "abc" not in json.dumps(found)
    if shown is None and isinstance(value, dict):
        assert found == value, "numbers, booleans, null and empty texts are no secrets"
    elif shown is not None:
        assert found == shown


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("params.hf_token=abc", f"params.hf_token={MASK}"),
        ('params.hf_token="abc"', f"params.hf_token={MASK}"),
        ("+params.hf_token=abc", f"+params.hf_token={MASK}"),
        ("params={hf_token: abc}", f"params={MASK}"),
        ("clusters.slurm.export=ALL,HF_TOKEN=abc", f"clusters.slurm.export=ALL,HF_TOKEN={MASK}"),
        ("command=[python, train.py, --token=abc]", f"command={MASK}"),
        ("params.lr=1e-3", "params.lr=1e-3"),
        ("params.key=3", "params.key=3"),
        ("params.widths=[8],[16,8]", "params.widths=[8],[16,8]"),  # an axis of a sweep
        ("params.tag='a','b'", "params.tag='a','b'"),
        ("params.at={hf_token: abc},{hf_token: abd}", f"params.at={MASK}"),
    ],
)
def test_an_override_is_masked_by_its_key_and_by_what_is_in_it(typed: str, shown: str) -> None:
    assert overrides.masked(typed) == shown


CONFIG = Config(
    name="x",
    command=["python", "train.py", "--token=abc123", "--hf-token", "abc123", "HF_TOKEN=abc123"],
    params={"hf_token": "abc123", "nested": [{"password": "abc123", "key": 3}], "lr": 1e-3},
    clusters={"slurm": {"export": "ALL,HF_TOKEN=abc123", "setup": ["export API_KEY=abc123"]}},
)


def test_the_run_has_its_config_in_full_and_its_folder_shows_it_masked(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    assert run.config() == CONFIG
    assert run_name(run.config()) == run_name(CONFIG)
    assert "abc123" not in run.config_file.read_text() and MASK in run.config_file.read_text()
    assert load(run.config_file).config == CONFIG, "as resume reads it"
    assert not secrets.lacking_in(dataclasses.asdict(run.config()))


def test_the_file_is_its_owners_alone_from_the_first_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    real = os.open

    def opening(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if "secrets" in str(path):
            modes.append((mode, bool(flags & os.O_EXCL)))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", opening)
    RunDir(tmp_path).write_config(CONFIG)
    assert modes == [(0o600, True)]
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600


def test_a_config_without_secrets_has_no_such_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    plain = Config(name="x", task="a:b", params={"key": 3})
    run.write_config(plain)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"] and run.config() == plain


def test_a_value_that_is_changed_by_hand_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    run.config_file.write_text(run.config_file.read_text().replace("hf_token: '***'", "hf_token: new"))
    assert run.config().params["hf_token"] == "new"


def test_a_file_of_the_users_own_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text('{"hf_token": "abc123"}')
    (tmp_path / "config.yaml").write_text("name: x\ntask: a:b\nparams: {hf_token: '***'}\n")
    assert load(tmp_path / "config.yaml").config.params == {"hf_token": MASK}


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    (tmp_path / "secrets.json").unlink()
    lacking = secrets.lacking_in(dataclasses.asdict(run.config()))
    assert "params.hf_token" in lacking and "params.nested.0.password" in lacking and "command.3" not in lacking


@only_root
def test_another_user_reads_the_masked_config_and_cannot_resume() -> None:
    with open_folder() as folder:
        project = Project(folder / "project")
        run = RunDir(project.path / "runs" / "x-00000001")
        run.path.mkdir(parents=True)
        run.write_config(CONFIG)
        importlib.import_module("jobkit.cli.resume")  # another user may not be able to read it
        assert as_nobody(run.config).params["hf_token"] == MASK
        said = as_nobody(lambda: jobkit(project, "resume", "x-00000001", expect=2)).stderr
        assert "its owner's alone" in said and "params.hf_token" in said


def test_a_dry_run_shows_no_secret(tmp_path: Path) -> None:
    project = Project(tmp_path)
    secret = ("+params.hf_token=abc123", "clusters.slurm.export=ALL,HF_TOKEN=abc123")
    setup = "clusters.slurm.setup=[export API_KEY='abc123 d']"
    done = jobkit(project, "submit", "toy.yaml", *secret, setup, "--cluster", "slurm", "--dry-run")
    assert "abc123" not in done.stdout + done.stderr
    assert "ALL,HF_TOKEN=***" in done.stdout and "hf_token: '***'" in done.stdout


@pytest.mark.parametrize(("setup", "mode"), [("export API_KEY=abc123", 0o600), ("module load cuda", 0o644)])
def test_a_batch_script_with_a_secret_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, mode: int
) -> None:
    monkeypatch.setattr(sbatch, "_sbatch", lambda run, pass_fds: "1")
    config = Config(name="x", task="a:b", clusters={"slurm": {"setup": [setup]}})
    run = RunDir(tmp_path / "x")
    run.submitit.mkdir(parents=True)
    before = os.umask(0o022)
    try:
        sbatch.submit(sbatch.Batch([make_plan(run.path, config, "slurm")]))
    finally:
        os.umask(before)
    assert setup in run.batch_script.read_text()
    assert stat.S_IMODE(run.batch_script.stat().st_mode) == mode


def test_tensorboards_page_of_parameters_shows_no_secret() -> None:
    assert flat(masked({"hf_token": "abc123", "nested": {"api_key": "abc123"}, "lr": 0.1})) == {
        "hf_token": MASK,
        "nested.api_key": MASK,
        "lr": 0.1,
    }


def test_a_masked_value_that_is_typed_again_is_refused(tmp_path: Path) -> None:
    project = Project(tmp_path)
    said = jobkit(project, "submit", "toy.yaml", "+params.hf_token='***'", "--local", expect=2).stderr
    assert "command line: params.hf_token: found ***" in said and "give the value" in said and project.runs == []


@pytest.mark.parametrize("file", sorted(ROOT.glob("experiments/*.yaml")), ids=lambda file: file.stem)
def test_nothing_of_the_experiments_is_taken_for_a_secret(file: Path) -> None:
    assert secrets.hidden_in(read_yaml(file)[0]) == []
