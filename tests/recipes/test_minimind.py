"""The recipe minimind: its model, its data, and a run with its texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from harness.runs import Project
from omegaconf import OmegaConf

import jobkit
from experiments.minimind.data import IGNORED, Bytes, Packed, Tokenizer, pack
from experiments.minimind.model import MiniMind, rotate

NEXT = Path(__file__).parents[2]
TINY = {"vocabulary": 258, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "theta": 1e4, "tie": True}
SMALL = [f"params.{word}" for word in ("model.dim=32", "model.layers=1", "model.hidden=64", "length=32", "batch=8",
         "micro_batch=2", "warmup=2", "sampling.new_tokens=5", "validate_batch=400")]  # fmt: skip


def recipe_project(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A folder with a recipe, in which no variable names its data."""
    for variable in ("MINIMIND_DATA", "COGVIDEO_DATA"):
        monkeypatch.delenv(variable, raising=False)
    project = Project(folder, {**os.environ, "OMP_NUM_THREADS": "1"}, plain=False)
    (folder / "experiments").mkdir()
    for source in (NEXT / "experiments").glob(f"{name}*"):
        (folder / "experiments" / source.name).symlink_to(source)
    return project


def test_the_full_model_has_63_9_million_parameters() -> None:
    with torch.device("meta"):
        net = MiniMind(**OmegaConf.load(NEXT / "experiments/minimind.yaml").params.model)
    assert sum(parameter.numel() for parameter in net.parameters()) == 63_912_192


def test_a_token_does_not_depend_on_those_after_it() -> None:
    net = MiniMind(**TINY, std=0.2)
    tokens = torch.randint(258, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = 0
    before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7:], after[:, 7:])


def test_attention_depends_on_the_distance_of_two_positions_alone() -> None:
    query, key = (rotate(torch.randn(1, 1, 1, 8).expand(1, 9, 1, 8), 1e4)[0, :, 0] for _ in range(2))
    scores = query @ key.T
    for distance in range(-8, 9):
        assert torch.allclose(scores.diagonal(distance), scores.diagonal(distance)[0], atol=1e-5)
    assert not torch.allclose(scores[0, 1], scores[0, 2])


def test_weights_that_leave_the_meta_device_are_tied_and_drawn() -> None:
    with torch.device("meta"):
        net = MiniMind(**TINY, std=0.02)
    net.to_empty(device="cpu").init_weights()
    assert net.head.weight is net.embed.weight
    assert 0.015 < net.block_0.query.weight.std() < 0.025 and (net.norm.weight == 1).all()


def test_packed_sequences_hold_each_token_as_a_target_once(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(60)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, *texts]))
    folder, texts_of = pack(file, Bytes(), held_out=0.3), {}
    for part in ("training", "held_out"):
        packed = Packed(folder / f"{part}.bin", 16, is_whole=True)
        sequences = [packed[i] for i in range(len(packed))]
        targets = torch.cat([target for _, target in sequences])
        tokens = [Bytes.begin, *targets[targets != IGNORED].tolist()]
        assert tokens == packed.tokens.tolist()
        assert all(torch.equal(tokens[1:], target[:-1]) for tokens, target in sequences[:-1])
        assert len(Packed(folder / f"{part}.bin", 16, is_whole=False)) == (len(tokens) - 1) // 16
        ends = [place for place, token in enumerate(tokens) if token == Bytes.end]
        texts_of[part] = [Bytes().decode(tokens[a + 1 : b]) for a, b in zip([-1, *ends], ends, strict=False)]
    assert sorted(texts_of["training"] + texts_of["held_out"]) == sorted(texts)  # each text in one part, and once
    facts = json.loads((folder / "corpus.json").read_text())
    assert facts["held_out_bytes"] == sum(map(len, texts_of["held_out"])) and len(facts["sha256"]) == 64
    assert pack(file, Bytes(), held_out=0.3) == folder != pack(file, Bytes(), held_out=0.4)


@pytest.mark.parametrize("line", ['{"text": "a"', '{"txt": "a"}', '{"text": 3}', '["a"]', "", '{"text": "\\ud800"}'])
def test_a_line_that_is_no_document_is_refused_by_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "b"}}\n{line}\n')
    with pytest.raises(jobkit.UsageError, match=rf"^{file}:2: "):
        pack(file, Bytes(), held_out=0.5)
    with pytest.raises(jobkit.UsageError, match=r"missing\.jsonl"):
        pack(tmp_path / "missing.jsonl", Bytes(), held_out=0.5)


def test_a_tokenizer_of_hugging_face_gives_a_text_back(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file, ends = tmp_path / "tokenizer.json", ["<|im_start|>", "<|im_end|>"]
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["the statement", "the state"], vocab_size=300, special_tokens=ends)
    model.save(str(file))
    tokenizer = Tokenizer(file, ends)
    tokens = tokenizer.encode("the statement é")
    assert len(tokens) < 10 and tokenizer.decode([tokenizer.begin, *tokens, tokenizer.end]) == "the statement é"
    with pytest.raises(jobkit.UsageError, match=r"params\.ends"):
        Tokenizer(file, ["<s>", "</s>"])


def test_a_run_is_exact_and_its_weights_write_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_process_left: None
) -> None:
    project = recipe_project(tmp_path / "project", "minimind", monkeypatch)
    yaml = "experiments/minimind.yaml"
    report = json.loads(project.jobkit("verify", yaml, *SMALL, "--local", "--steps", "9", "--json").stdout)
    assert report["equal"] and "evaluation" not in report["missing"], report
    project.jobkit("submit", yaml, *SMALL, "params.steps=12", "--local")
    (run,) = (project.folder / "runs").glob("minimind-*")
    result = json.loads((run / "final/result.json").read_text())
    assert len(result["corpus"]) == 64 and 1 < result["validation/bits_per_byte"] < 9
    words = [f"params.run={run}", "params.samples=2", "params.sampling.new_tokens=6"]
    project.jobkit("submit", "experiments/minimind_generate.yaml", *words, "--local")
    texts = [file.read_text() for file in sorted(project.folder.glob("runs/minimind_generate-*/samples/*.txt"))]
    assert len(texts) == 6 and all(text.startswith('The "for"') for text in texts[:2]) and texts[0] != texts[1]
