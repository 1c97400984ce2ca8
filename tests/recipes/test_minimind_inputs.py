"""minimind's data and tokenizer: built by tools/train_tokenizer.py, checked before anything is queued, trained on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, status

from experiments.minimind import documents
from experiments.minimind.check import check
from experiments.minimind.data import Corpus, open_corpus
from experiments.minimind.documents import tokens_of
from experiments.minimind.tokens import ByteTokenizer, FileTokenizer, open_tokenizer
from jobkit.errors import InputError, InvalidValue, UsageError

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_tokenizer.py"
ENDS = ("<|im_start|>", "<|im_end|>")
TEXT = "the model learns what comes after it 中国的首都是北京 and naïve text of every kind"


def build(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def document(number: int) -> str:
    words = TEXT.split()
    return f"document {number}: " + " ".join(words[(number * step) % len(words)] for step in range(1, 30))


def write(file: Path, *lines: str) -> Path:
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def as_lines(count: int) -> list[str]:
    return [json.dumps({"text": document(number)}, ensure_ascii=False) for number in range(count)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "text.jsonl", *as_lines(400))


# The tool


def test_a_tokenizer_is_built_from_the_data(data: Path, tmp_path: Path) -> None:
    done = build(data, tmp_path / "tokenizer.json", "--vocabulary", 400)
    assert done.returncode == 0, done.stderr
    assert "400 tokens, from 400 documents" in done.stdout
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"), *ENDS, vocabulary=400)
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocabulary) == (1, 2, 400)
    unseen = "中国 is naïve, 🙂 unseen\n"
    (tokens, known) = tokenizer.encode([unseen, document(3)])
    assert tokenizer.decode([1, *tokens, 2]) == unseen
    assert len(known) < 0.4 * len(document(3).encode())
    assert build(data, tmp_path / "again.json", "--vocabulary", 400).returncode == 0
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "text.jsonl", "tokenizer.json"]


def test_what_the_data_have_no_pairs_for_is_said(data: Path, tmp_path: Path) -> None:
    done = build(data, tmp_path / "tokenizer.json")
    assert done.returncode == 0 and "(6,400 asked for: no pair is left)" in done.stdout


def test_a_part_of_the_documents_is_spread_over_the_file(data: Path, tmp_path: Path) -> None:
    lines = data.read_text().splitlines()
    write(data, *lines[:200], *(json.dumps({"text": "zebra " * 20}) for _ in range(200)))
    done = build(data, tmp_path / "tokenizer.json", "--vocabulary", 300, "--documents", 40)
    assert done.returncode == 0, done.stderr
    taken = int(done.stdout.split("from ")[1].split(" documents")[0])
    assert 20 <= taken <= 80
    (tokens,) = FileTokenizer(tmp_path / "tokenizer.json", *ENDS).encode(["zebra zebra"])
    assert len(tokens) < 8, "the second half was read, too"


def test_lines_that_are_no_documents_are_named_and_nothing_is_written(data: Path, tmp_path: Path) -> None:
    broken = ["{", '{"txt": "a"}', '{"text": 3}']
    write(data, *data.read_text().splitlines(), "", *broken)
    done = build(data, tmp_path / "tokenizer.json", "--vocabulary", 300)
    assert done.returncode == 2 and "3 broken line(s) among those read: mend or remove them" in done.stderr
    assert not (tmp_path / "tokenizer.json").exists()
    for number, line in enumerate(broken, start=402):
        assert f'broken: {data}:{number}: expected {{"text": "..."}}, found {line}' in done.stderr


def test_wrong_input_is_a_line_with_exit_code_2_and_writes_nothing(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    (empty := tmp_path / "empty.jsonl").touch()
    there = write(tmp_path / "there.json", "{}")
    (tmp_path / "none").mkdir()
    write(tmp_path / "none" / "tokenizers.py", "raise ImportError")
    for arguments, environment, said in [
        ((tmp_path / "nowhere.jsonl", out), {}, "nowhere.jsonl: cannot be read: No such file"),
        ((tmp_path, out), {}, "cannot be read: Is a directory"),
        ((data, there), {}, "there.json: is there already"),
        ((data, tmp_path / "no" / "out.json"), {}, "no: cannot be written"),
        ((empty, out), {}, "empty.jsonl: no document in it"),
        ((write(tmp_path / "bad.jsonl", "1", "2"), out), {}, "bad.jsonl: no document in it, 2 broken line(s)"),
        ((data, out, "--vocabulary", 258), {}, "--vocabulary: found 258, expected 259 or more"),
        ((data, out), {"PYTHONPATH": str(tmp_path / "none")}, "-m pip install -c "),
    ]:
        done = build(*arguments, **environment)
        assert done.returncode == 2 and said in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr and not out.exists()
    assert there.read_text() == "{}\n"


def test_an_interrupted_one_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    pipe, out = tmp_path / "text.jsonl", tmp_path / "tokenizer.json"
    write(pipe, *as_lines(10))
    slow = write(
        tmp_path / "slow.py",
        "import runpy, sys, time",
        f"sys.path.insert(0, {str(ROOT)!r})",
        "import experiments.minimind.documents as documents",
        "def wait(line, place):",
        "    print('reading', flush=True)",
        "    time.sleep(600)",
        "documents.text_of = wait",
        f"sys.argv = ['train_tokenizer.py', {str(pipe)!r}, {str(out)!r}]",
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')",
    )
    process = subprocess.Popen([sys.executable, str(slow)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; nothing was written" in said
    assert "Traceback" not in said and sorted(path.name for path in tmp_path.iterdir()) == ["slow.py", "text.jsonl"]


def test_one_long_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"text": document(number)} for number in range(50)]))
    monkeypatch.setattr(documents, "LONGEST", 100)
    with array.open("rb") as opened:
        assert max(map(len, documents.lines_of(opened))) == 100
    with pytest.raises(InputError, match=r'array\.json:1: expected \{"text": "\.\.\."\}, found \[\{"text"'):
        list(documents.documents(array))


# Before anything is queued

SMALL = (
    "params.model={vocabulary: 400, dim: 32, layers: 2, heads: 4, kv_heads: 2, hidden: 64, theta: 1e4, tie: true}",
    "params.length=24",
    "params.batch=6",
    "params.micro_batch=2",
    "params.lr=5e-3",
    "params.held_out=0.2",
    "params.workers=0",
    "params.validate_every=20",
    "params.prompt=document",
    "params.sampling.new_tokens=5",
    "params.epochs=1",
    "precision=fp32",
    "resources={tasks_per_node: 2, gpus_per_task: 0}",
)


@pytest.fixture
def project(tmp_path: Path, data: Path) -> Project:
    """A folder with the experiments, data and a tokenizer for them."""
    tokenizer = tmp_path / "tokenizer.json"
    assert build(data, tokenizer, "--vocabulary", 400).returncode == 0
    project = Project(tmp_path / "project", {"MINIMIND_DATA": str(data), "MINIMIND_TOKENIZER": str(tokenizer)})
    shutil.copytree(ROOT / "experiments", project.path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    return project


def refused(project: Project, *overrides: str, **environment: str) -> str:
    """The line of a submission that is refused; nothing is started."""
    project.env |= environment
    done = jobkit(project, "submit", "experiments/minimind.yaml", "--local", *SMALL, *overrides, expect=2)
    assert not project.runs and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_data_of_another_format_are_refused_with_file_and_line(project: Project, data: Path) -> None:
    lines = data.read_text().splitlines()
    for number, line in ((1, '{"conversations": []}'), (3, "plain text")):
        write(data, *lines[: number - 1], line, *lines)
        said = refused(project)
        assert f'params.data: {data}:{number}: expected {{"text": "..."}}, found {line}' in said
        assert said.startswith(f"error: {Path('experiments/minimind.yaml')}:")
    write(data, *lines)
    for override, said in (("params.held_out=0", "params.held_out: found 0, "), ("params.length=2", "expected 3")):
        assert said in refused(project, override)
    write(data)
    assert f"params.data: {data}: no document in it" in refused(project)
    data.unlink()
    assert f"inputs: {data}: no such file" in refused(project)


def test_all_lines_of_a_small_file_are_looked_at(project: Project, data: Path) -> None:
    write(data, *as_lines(1200), "plain text")
    assert f'params.data: {data}:1201: expected {{"text": "..."}}, found plain text' in refused(project)


def test_a_part_to_hold_out_that_is_no_document_is_refused_with_one_that_is(project: Project, data: Path) -> None:
    said = refused(project, "params.held_out=0.00001")
    found = re.search(r"params.held_out: with 1e-05, 0 of 400 documents of \S+ are for validation: give (\S+) to", said)
    assert found and 0 < float(found[1]) < 0.05
    assert open_corpus(data, ByteTokenizer(), float(found[1])).held_out == 1
    said = refused(project, "params.held_out=0.999999")
    assert (found := re.search(r"400 of 400 documents .* to (\S+)$", said.strip()))
    assert open_corpus(data, ByteTokenizer(), float(found[1])).held_out < 400
    write(data, *as_lines(1))
    assert f"params.data: {data}: one document in it, expected 2 or more" in refused(project)


def test_data_beside_which_nothing_can_be_written_are_refused_and_a_link_to_them_is_not(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    link = tmp_path / "mine" / "text.jsonl"
    link.symlink_to(data)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != data.parent)
    params = {"length": 24, "held_out": 0.2, "topics": False, "tokenizer": "bytes", "model": {"vocabulary": 258}}
    params |= {"begin_of_text": "", "end_of_text": ""}
    with pytest.raises(InvalidValue, match="cannot be written, and the tokens go there: link the file"):
        check(params | {"data": str(data)})
    check(params | {"data": str(link)})
    tokens_of(data).mkdir()
    check(params | {"data": str(data)})


def test_a_tokenizer_that_does_not_fit_is_refused(project: Project, tmp_path: Path) -> None:
    tokenizer = project.env["MINIMIND_TOKENIZER"]
    said = refused(project, "params.end_of_text=<|eos|>")
    assert f"params.tokenizer: {tokenizer}: no token '<|eos|>', which params.end_of_text names" in said
    said = refused(project, "params.model.vocabulary=300")
    assert f"params.tokenizer: {tokenizer} has 400 tokens, and params.model.vocabulary is 300" in said
    write(Path(tokenizer), '{"model": 3}')
    assert f"params.tokenizer: {tokenizer}: not a tokenizer.json: " in refused(project)


def test_without_the_package_the_refusal_says_what_to_type(project: Project, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    write(tmp_path / "none" / "tokenizers.py", "raise ImportError")
    said = refused(project, PYTHONPATH=str(tmp_path / "none"))
    assert "params.tokenizer: " in said and "-m pip install -c " in said


def test_a_model_trains_on_the_data_with_the_tokenizer_that_was_built(project: Project) -> None:
    project.jobkit("submit", "experiments/minimind.yaml", "--local", *SMALL)
    (run,) = project.runs
    found = status(run)
    corpus = json.loads(next(project.path.parent.glob("text.jsonl.tokens/*/corpus.json")).read_text())
    assert found["step"] == -(-(corpus["documents"] - corpus["held_out"]) // 6), "one epoch"
    assert 0 < found["result"]["nats_per_token"] < 5.0  # ln 400 is 5.99
    assert found["result"]["corpus"] == corpus["sha256"]
    assert all(file.read_text().startswith("document") for file in (run / "samples").iterdir())
    Path(project.env["MINIMIND_TOKENIZER"]).unlink()
    assert build(project.env["MINIMIND_DATA"], project.env["MINIMIND_TOKENIZER"], "--vocabulary", 399).returncode == 0
    generate = ("params.prompts=[document]", "precision=fp32", "resources={gpus_per_task: 0}", f"params.run={run}")
    said = project.jobkit("submit", "experiments/minimind_generate.yaml", "--local", *generate, expect=1).stderr
    assert f"tokenizer.json: not the tokenizer that {run} was trained with" in said


def test_the_small_model_trains_on_ones_own_text_and_writes_on_from_ones_own_prompts(
    project: Project, data: Path
) -> None:
    own = (f"params.data={data}", "params.topics=false", "params.prompt=Once upon", "params.steps=2")
    project.jobkit("submit", "experiments/minimind.yaml", "--local", "--demo", *own)
    (run,) = project.runs
    assert status(run)["step"] == 2
    assert all(file.read_text().startswith("Once upon") for file in (run / "samples").iterdir())
    made = (
        f"params.run={run}",
        "params.prompts=[Once upon, The cat]",
        "params.samples=1",
        "params.sampling.new_tokens=5",
    )
    project.jobkit("submit", "experiments/minimind_generate.yaml", "--local", "--demo", *made)
    texts = [file.read_text() for file in sorted(run.parent.glob("minimind_generate-*/samples/*"))]
    assert [text[:7] for text in texts] == ["Once up", "The cat"]
    assert (
        "No such file"
        in jobkit(
            project,
            *(
                "submit",
                "experiments/minimind.yaml",
                "--local",
                "--demo",
                "params.data=none.jsonl",
                "params.topics=false",
            ),
            expect=2,
        ).stderr
    )


def test_a_run_does_not_go_on_with_other_documents_or_another_tokenizer(data: Path, tmp_path: Path) -> None:
    build(data, tmp_path / "one.json", "--vocabulary", 400)
    build(data, tmp_path / "two.json", "--vocabulary", 399)

    def opened(tokenizer: str) -> Corpus:
        return open_corpus(data, open_tokenizer(str(tmp_path / tokenizer), *ENDS, vocabulary=400), 0.2)

    trained = opened("one.json").state_dict()
    opened("one.json").load_state_dict(trained)
    with pytest.raises(UsageError, match="trained on other tokens"):
        opened("two.json").load_state_dict(trained)
    write(data, *reversed(as_lines(400)))
    with pytest.raises(UsageError, match="trained on other documents"):
        opened("one.json").load_state_dict(trained)


def test_the_full_recipe_is_planned_for_slurm(project: Project, data: Path) -> None:
    overrides = "resources={tasks_per_node: 8, gpus_per_task: 1}", "params.held_out=0.02"  # of few documents
    done = jobkit(project, "submit", "experiments/minimind.yaml", "--cluster", "slurm", "--dry-run", *overrides)
    assert "1 node(s) x 8 task(s) = 8 rank(s)" in done.stdout and "#SBATCH --gpus-per-node=8" in done.stdout
    assert f"data: {data}" in done.stdout and "demo" not in done.stderr
    said = jobkit(
        project,
        *("submit", "experiments/minimind_generate.yaml", "--cluster", "slurm", "--dry-run"),
        "params.run=runs/minimind-none",
        expect=2,
    ).stderr
    assert "inputs: runs/minimind-none/config.yaml: no such file" in said
    run = project.path / "runs" / "minimind-0123abcd"
    (run / "final").mkdir(parents=True)
    for name in ("config.yaml", "final/model.safetensors"):
        (run / name).touch()
    done = jobkit(
        project,
        *("submit", "experiments/minimind_generate.yaml", "--cluster", "slurm", "--dry-run"),
        f"params.run={run}",
    )
    assert "1 node(s) x 1 task(s) = 1 rank(s)" in done.stdout
