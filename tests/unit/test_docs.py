"""README and docs say what there is: keys, commands, files, tests and links exist, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import config_reference
import pytest
from harness.documents import PAGES, ROOT, commands, without_code

from jobkit.cli import main as cli
from jobkit.run.experiment import read_experiment, stages_of

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)

LONGEST_README = 900
"""Words of prose and tables, addresses of links included; code blocks do not count."""


def test_the_readme_is_short() -> None:
    assert len(without_code((ROOT / "README.md").read_text()).split()) <= LONGEST_README


def test_the_reference_of_the_yaml_is_what_the_code_says() -> None:
    assert (ROOT / "docs/config.md").read_text() == config_reference.reference()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    text = without_code(page.read_text())
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/.-])(?:tools|experiments|docs|tests|jobkit)/[\w./]+\.(?:\w+)", page.read_text())
    for file in named:
        assert (ROOT / file).exists(), file


@every_page
def test_no_path_of_the_machine_it_was_written_on(page: Path) -> None:
    assert not re.findall(r"/work/|/root\b|/tmp/[a-z]\w*", page.read_text())


def test_every_test_that_the_docs_name_exists() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    missing = sorted(name for name in named if f"def {name}(" not in tests)
    assert not missing
    assert len(named) > 30


RUN_BY = {
    "git clone <this repository> jobkit && cd jobkit": "test_the_first_screen_of_the_readme_in_a_fresh_clone",
    "tools/run experiments/imagenet64.yaml --local": "test_the_first_screen_of_the_readme_in_a_fresh_clone",
    "python -m jobkit.submit toy.yaml --local": "test_the_example_and_the_commands_of_the_readme_run",
    "python -m jobkit.submit toy.yaml --cluster slurm params.lr=3e-4 resources.nodes=1": "test_the_example_on_slurm",
    "python -m jobkit.submit toy.yaml --cluster slurm --dry-run": "test_the_example_on_slurm",
    "python -m jobkit.submit toy.yaml --cluster slurm --dry-run --check-model": (
        "test_a_strategy_that_the_model_cannot_have_is_found_before_anything_is_queued"
    ),
    "python -m jobkit doctor": "test_doctor_measures_two_nodes_of_a_slurm",
    "python -m jobkit doctor --cluster h100 --nodes 2 --no-probe": "test_a_cluster_of_the_users_own",
    "python -m jobkit doctor --local --no-probe": "test_the_checks_of_this_machine_run",
    "python -m jobkit.submit toy.yaml --cluster h100": "test_a_cluster_of_the_users_own",
    "python -m jobkit.submit toy.yaml --cluster h100 --dry-run": "test_a_cluster_of_the_users_own",
    "python -m jobkit preempt RUN": "test_a_preemption_can_be_rehearsed_with_and_without_grace",
    "python -m jobkit preempt RUN --no-grace": "test_a_preemption_can_be_rehearsed_with_and_without_grace",
    'eval "$(tools/slurm_cluster.py up --cred-expire 5)"': "test_a_preemption_on_the_private_cluster",
    "tools/run experiments/imagenet64.yaml --cluster slurm name=boxed": "test_a_preemption_on_the_private_cluster",
    'sbatch --partition=high --nodes=4 --exclusive -o /dev/null --wrap "sleep 1"': (
        "test_a_preemption_on_the_private_cluster"
    ),
    ".venv/bin/python -m jobkit status boxed": "test_a_preemption_on_the_private_cluster",
    "tools/slurm_cluster.py status": "test_a_preemption_on_the_private_cluster",
    "tools/slurm_cluster.py down; unset SLURM_CONF": "test_a_preemption_on_the_private_cluster",
    "tools/slurm_cluster.py up --nodes 8 --grace 60 --preempt cancel": "test_private_clusters_that_differ",
    "tools/slurm_cluster.py up --user-signal --no-requeue --kill-wait 30": "test_private_clusters_that_differ",
    "tests/soak/chaos.py --soak": "test_the_plan_of_the_soak_can_be_seen",
    "tests/soak/adopted.py --only preempted": "test_chaos_and_benches",
    "tests/soak/chaos.py --seed 7 --events 5 --local": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/all.py": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/submit.py --repeats 9": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/step.py --ranks 1 2": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/checkpoint.py --megabytes 512 --repeats 7": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/evaluate.py --ranks 4": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/evaluate.py --clips 16": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/input.py": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/overlap.py": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/journal.py --checkpoints 86400 864000": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/list.py --runs 10000": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/many.py": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/restart.py --cred-expire 120": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/start.py": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/start.py --slurm": "test_chaos_and_benches",
    **dict.fromkeys(
        (
            ".venv/bin/python tools/bench/simulate.py --draw docs/goodput.png",
            ".venv/bin/python tools/bench/simulate.py --settings --queue 1",
            ".venv/bin/python tools/bench/simulate.py --spares",
        ),
        "test_the_comparisons_of_the_docs_are_made",
    ),
    "tools/test cuda": "test_without_a_gpu_the_tests_for_one_say_so_in_a_line",
    "tools/test cuda --json FILE": "test_without_a_gpu_the_tests_for_one_say_so_in_a_line",
    "JOBKIT_TEST_DEVICE=cpu .venv/bin/python -m pytest tests/cuda": "test_chaos_and_benches",
    ".venv/bin/python tools/bench/cuda.py --device cpu --small --no-compile": "test_chaos_and_benches",
    "tests/soak/sixty_four.py": "test_sixty_four_ranks",
    "python myscript.py": "test_the_example_of_a_script_runs",
    "torchrun --nproc_per_node=2 myscript.py": "test_the_example_of_a_script_runs_under_torchrun",
    "python train.py --lr 1e-2": "test_a_run_by_python_continues_after_ctrl_c_and_after_a_kill",
    "torchrun --nproc_per_node=2 train.py --lr 1e-2": (
        "test_two_ranks_of_torchrun_continue_after_ctrl_c_and_after_the_death_of_one"
    ),
    **dict.fromkeys(
        (
            "mpirun -n 2 python train.py --lr 1e-2",
            "srun --nodes=2 --ntasks-per-node=1 python train.py --lr 1e-2",
        ),
        "test_a_run_goes_on_under_any_launcher_and_ends_with_the_uninterrupted_weights",
    ),
    "python -m jobkit.submit mine.yaml --local": (
        "test_an_adopted_script_goes_on_after_ctrl_c_as_if_there_were_no_jobkit"
    ),
    "python -m jobkit.submit mine.yaml --cluster slurm": (
        "test_adopted_scripts_are_preempted_and_lose_a_rank_and_end_with_the_weights_of_before"
    ),
    **{
        f"torchrun --nnodes=2 --node_rank={node} --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 "
        "myscript.py": ("test_two_machines_without_a_shared_disk_each_keep_a_copy_and_resume")
        for node in (0, 1)
    },
    **{
        f"torchrun --nnodes=2 --node_rank={node} --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 "
        "-m jobkit.worker experiments/minimind.yaml params.lr=3e-4": (
            "test_two_machines_without_a_shared_disk_lose_one_and_continue"
        )
        for node in (0, 1)
    },
    **{
        f"{launcher} jobkit.worker experiments/minimind.yaml": test
        for launcher, test in {
            "torchrun --standalone --nproc_per_node=8 -m": (
                "test_a_restart_by_torchrun_continues_though_the_command_says_fresh"
            ),
            "mpirun -n 8 python -m": "test_a_run_goes_from_srun_to_mpirun_and_on_to_a_job",
            "srun --nodes=2 --ntasks-per-node=8 python -m": "test_a_run_goes_from_srun_to_mpirun_and_on_to_a_job",
            "python -m torch.distributed.launch --nproc_per_node=8 -m": "test_help_and_an_argument_of_an_old_launcher",
            "python -m": "test_a_second_launch_of_a_run_that_trains_says_where_and_starts_nothing",
        }.items()
    },
    "tools/run experiments/cogvideo.yaml --local": "test_the_small_recipes",
    "tools/run experiments/cogvideo_sample.yaml --local params.run=$(echo runs/cogvideo-*)": ("test_the_small_recipes"),
    "tools/run experiments/minimind.yaml --local": "test_the_small_recipes",
    "tools/run experiments/minimind_generate.yaml --local params.run=$(echo runs/minimind-*)": (
        "test_the_small_recipes"
    ),
    ".venv/bin/python -m pip install -c tools/constraints.txt tokenizers": (
        "test_without_the_package_the_refusal_says_what_to_type"
    ),
    ".venv/bin/python tools/train_tokenizer.py .../pretrain_t2t_mini.jsonl .../tokenizer.json --vocabulary 6400": (
        "test_a_tokenizer_is_built_from_the_data"
    ),
    "export MINIMIND_DATA=.../pretrain_t2t_mini.jsonl MINIMIND_TOKENIZER=.../tokenizer.json": (
        "test_a_model_trains_on_the_data_with_the_tokenizer_that_was_built"
    ),
    "tools/run experiments/minimind.yaml --cluster slurm": "test_the_full_recipe_is_planned_for_slurm",
    "tools/run experiments/minimind_generate.yaml --cluster slurm params.run=runs/minimind-...": (
        "test_the_full_recipe_is_planned_for_slurm"
    ),
    "tools/run experiments/minimind.yaml --local --demo params.data=.../mine.jsonl params.topics=false "
    "'params.prompt=Once upon'": "test_the_small_model_trains_on_ones_own_text_and_writes_on_from_ones_own_prompts",
    "tools/run experiments/minimind_generate.yaml --local --demo params.run=runs/minimind-... "
    "'params.prompts=[Once upon, The cat]'": (
        "test_the_small_model_trains_on_ones_own_text_and_writes_on_from_ones_own_prompts"
    ),
    "tools/run experiments/cogvideo.yaml --local --demo params.data=.../latents params.digits=false params.held_out=4 "
    "'params.latent=[16,3,8,12]' 'params.text=[226,4096]'": "test_the_small_model_trains_on_ones_own_clips",
    "tools/run experiments/cogvideo_sample.yaml --local --demo params.run=runs/cogvideo-... params.clips=4": (
        "test_the_small_model_trains_on_ones_own_clips"
    ),
    "tools/run experiments/imagenet64.yaml --local --demo params.data=.../mine params.digits=false params.res=16 "
    "params.channels=3 params.classes=3 params.held_out=6": "test_the_small_model_trains_on_ones_own_images",
    "tools/run experiments/imagenet64_sample.yaml --local --demo params.run=runs/imagenet64-... params.samples=30": (
        "test_the_small_model_trains_on_ones_own_images"
    ),
    "tools/run experiments/imagenet64_sample.yaml --local params.run=$(echo runs/imagenet64-*)": (
        "test_the_small_recipes"
    ),
    ".venv/bin/python tools/prepare_imagenet.py .../train_blurred $IMAGENET_DIR --name train_blurred": (
        "test_the_layout_the_pixels_and_the_broken_images"
    ),
    ".venv/bin/python tools/prepare_video.py .../videos $COGVIDEO_DATA --weights $COGVIDEO_WEIGHTS": (
        "test_commands_at_once_make_the_same_bytes_as_one_alone"
    ),
    **dict.fromkeys(
        (
            "COGVIDEO_DATA=... tools/run experiments/cogvideo.yaml --cluster slurm",
            "COGVIDEO_DATA=... tools/run experiments/cogvideo_sample.yaml --cluster slurm params.run=RUN "
            "params.vae=$COGVIDEO_WEIGHTS/vae",
            ".venv/bin/python tools/decode_video.py runs/SAMPLED/samples clips --weights $COGVIDEO_WEIGHTS",
        ),
        "test_from_videos_over_training_and_sampling_to_clips_that_can_be_watched",
    ),
    **{
        f"COGVIDEO_DATA=... COGVIDEO_WEIGHTS=... tools/run experiments/cogvideo_finetune.yaml {where}": (
            "test_fine_tuning_begins_with_the_published_weights_and_validates_by_clips_that_can_be_watched"
        )
        for where in ("--cluster slurm", "--local")
    },
    "IMAGENET_DIR=... tools/run experiments/imagenet64.yaml --local": (
        "test_the_full_recipes_run_on_a_workstations_gpus_and_keep_their_size_on_slurm"
    ),
    "IMAGENET_DIR=... tools/run experiments/imagenet64_sample.yaml --local params.run=$(echo runs/imagenet64-*) "
    "params.fid=true": "test_samples_have_the_fid_that_training_ended_with_on_any_number_of_ranks",
    "IMAGENET_DIR=... tools/run experiments/imagenet64.yaml --cluster slurm": (
        "test_the_full_recipe_is_submitted_as_64_ranks"
    ),
}
"""Each command of the docs, and the test that runs it, as it stands or in small; those in tests/soak are slow."""


def test_a_test_runs_every_command() -> None:
    assert {command for page in PAGES for command in commands(page)} == set(RUN_BY)
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in RUN_BY.values() if f"def {name}(" not in tests]


def options_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "completion"])  # which ends with a line a shell
def test_the_help_of_every_verb_ends_with_examples_of_options_that_exist(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known, found, examples = options_of(verb, capsys).partition("Examples:")
    assert found
    for option in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", examples):
        assert option in known, option


def test_the_readme_lists_every_verb() -> None:
    listed = (ROOT / "README.md").read_text().partition("## Commands")[2].partition("Exit codes")[0]
    assert [verb for verb in cli.VERBS if not re.search(rf"\b{verb}\b", listed)] == []


@every_page
def test_every_verb_and_option_exists(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inline = re.findall(r"`([^`\n]+)`", without_code(page.read_text()))
    for command in commands(page) + inline:
        found = re.search(r"(?:^|python -m )(?:jobkit (\w+)|jobkit\.submit|tools/run)(?: (.*)|$)", command)
        if found:
            verb = found[1] or "submit"
            assert verb in cli.VERBS, command
            known = options_of(verb, capsys)
            for option in re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", found[2] or ""):
                assert option in known, command


@every_page
def test_every_module_that_is_named_exists(page: Path) -> None:
    for name in set(re.findall(r"\bjobkit(?:\.\w+)+", page.read_text())):
        place, parts = ROOT, name.split(".")
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        if parts and (place / f"{parts[0]}.py").exists():
            place /= f"{parts.pop(0)}.py"
        place = place / "__init__.py" if place.is_dir() else place
        assert not parts or re.search(rf"\b{parts[0]}\b", place.read_text()), name


@every_page
def test_every_whole_experiment_is_accepted(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if re.search(r"^name:", block, re.MULTILINE):
            file = tmp_path / "experiment.yaml"
            file.write_text(block)
            experiment = read_experiment(file)
            stages = [experiment] if experiment.pipeline is None else stages_of(experiment).values()
            for stage in stages:
                stage.config()


MOST_FILES = 8
"""Through which a reader follows one value."""

WALKS = re.findall(r"^### (.*?)\n(.*?)(?=^#)", (ROOT / "docs/internals.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("value", "text"), WALKS, ids=[value for value, _ in WALKS])
def test_a_walk_is_short_and_each_function_is_where_it_says(value: str, text: str) -> None:
    rows = re.findall(r"^\| `(jobkit/\S+)` \| (.*) \|$", text, re.MULTILINE)
    assert 0 < len({file for file, _ in rows}) <= MOST_FILES
    for file, says in rows:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)\(\)`", says):
            assert re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE), f"{name} in {file}"


def test_there_are_the_four_walks() -> None:
    assert [value for value, _ in WALKS] == [
        "`checkpoint.every`",
        "`params.lr`",
        "A preemption's cause",
        "The training function's result",
    ]
