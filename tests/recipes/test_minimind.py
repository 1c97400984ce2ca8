"""The minimind experiment: its recipe, model, data and samples, and that a run of it survives being interrupted."""

from __future__ import annotations

import inspect
import json
import math
import multiprocessing
import pickle
import shutil
import signal
import socket
import time
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from harness.project import Project, events, logged_steps, status, step, wait_for, weights

from experiments.minimind import data
from experiments.minimind.data import IGNORED, Corpus, Samples, open_corpus
from experiments.minimind.documents import documents
from experiments.minimind.model import Block, MiniMind, rotate
from experiments.minimind.sampling import complete, draw
from experiments.minimind.tokens import ByteTokenizer, open_tokenizer
from experiments.minimind.topics import write_topics
from experiments.minimind.train import cross_entropy
from jobkit.errors import InputError
from jobkit.run.config import Config
from jobkit.run.experiment import load
from jobkit.train import schedule
from jobkit.train.exported import load_weights

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = {"vocabulary": 258, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "theta": 1e4, "tie": True}


def recipe(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Config:
    for variable in ("MINIMIND_DATA", "MINIMIND_TOKENIZER"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    return load(EXPERIMENTS / "minimind.yaml").config


def tiny(**changes: object) -> MiniMind:
    torch.manual_seed(0)
    return MiniMind(**{**TINY, **changes})


def write(file: Path, *texts: str) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A .jsonl file of 40 different documents."""
    return write(tmp_path / "a.jsonl", *(f"document {number}" for number in range(40)))


def read(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The training and the held-out documents of a corpus of bytes, from its packed tokens."""
    both = []
    for name in ("training", "held_out"):
        tokens = np.fromfile(corpus.folder / f"{name}.bin", corpus.dtype)
        starts = np.fromfile(corpus.folder / f"{name}.starts", "uint64").astype(int)
        assert starts[0] == 0 and starts[-1] == len(tokens)
        assert (tokens[starts[:-1]] == 256).all() and (tokens[starts[1:] - 1] == 257).all()
        both.append([ByteTokenizer().decode(tokens[a + 1 : b - 1]) for a, b in pairwise(starts)])
    return both[0], both[1]


# The recipe


def test_the_full_recipe_has_63_9_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch, MINIMIND_DATA="/data/text.jsonl", MINIMIND_TOKENIZER="/data/tokenizer.json")
    with torch.device("meta"):
        net = MiniMind(**config.params["model"])
    assert sum(parameter.numel() for parameter in net.parameters()) == 63_912_192
    assert config.inputs == ["/data/text.jsonl", "/data/tokenizer.json"]


PUBLISHED = {
    # trainer/train_pretrain.py: the defaults of its options
    "epochs": 2,  # --epochs
    "steps": None,
    "micro_batch": 32,  # --batch_size
    "batch": 32 * 8,  # --accumulation_steps
    "lr": 5e-4,  # --learning_rate
    "max_norm": 1.0,  # --grad_clip
    "length": 340,  # --max_seq_len
    # dataset/lm_dataset.py: PretrainDataset; model/tokenizer_config.json: bos_token, eos_token
    "packed": False,
    "begin_of_text": "<|im_start|>",
    "end_of_text": "<|im_end|>",
    # trainer/trainer_utils.py: get_lr, lr * (0.1 + 0.45 * (1 + cos(pi * step / steps)))
    "warmup": 0,
    "floor": 0.1,
    # model/model_minimind.py: MiniMindConfig
    "model": {
        "vocabulary": 6400,
        "dim": 768,
        "layers": 8,
        "heads": 8,
        "kv_heads": 4,
        "hidden": math.ceil(768 * math.pi / 64) * 64,
        "theta": 1e6,
        "tie": True,
        "std": 0.02,  # initializer_range of transformers' PreTrainedModel
    },
}
"""Options of github.com/jingyaogong/minimind at commit d65ef2c, each with where it stands there."""


def test_every_option_of_the_full_recipe_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch, MINIMIND_DATA="/data/text.jsonl", MINIMIND_TOKENIZER="/data/tokenizer.json")
    assert {key: config.params[key] for key in PUBLISHED} == PUBLISHED
    adamw = inspect.signature(torch.optim.AdamW).parameters  # optim.AdamW(model.parameters(), lr=args.learning_rate)
    assert tuple(config.params["betas"]) == adamw["betas"].default
    assert config.params["weight_decay"] == adamw["weight_decay"].default
    assert config.precision == "bf16"  # --dtype


def test_the_learning_rate_falls_as_minimind_has_it() -> None:
    for update in (0, 1, 250, 500, 999, 1000):
        published = 0.1 + 0.45 * (1 + math.cos(math.pi * update / 1000))
        assert schedule.cosine_at(update, steps=1000, floor=0.1) == pytest.approx(published, abs=1e-12)


def test_weights_begin_as_minimind_has_them() -> None:
    torch.manual_seed(0)
    net = MiniMind(**{**TINY, "dim": 128, "hidden": 256})
    for name, parameter in net.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05) and abs(parameter.mean().item()) < 1e-3, name
        else:
            assert (parameter == 1).all(), name
    parts = list(net.modules())
    assert {part.eps for part in parts if isinstance(part, torch.nn.RMSNorm)} == {1e-6}  # rms_norm_eps
    assert not any(isinstance(part, torch.nn.Dropout) for part in parts)  # dropout: 0.0


def test_without_data_the_small_recipe_reads_pythons_help_texts_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch)
    net = MiniMind(**config.params["model"])
    assert sum(parameter.numel() for parameter in net.parameters()) < 0.5e6
    assert config.params["topics"] and config.params["tokenizer"] == "bytes" and config.inputs == []


# The model


@pytest.mark.parametrize("tie", [True, False])
def test_what_comes_later_does_not_change_the_logits_before_it(tie: bool) -> None:
    net = tiny(tie=tie)
    tokens = torch.randint(257, (2, 20))
    other = tokens.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 257
    with torch.no_grad():
        a, b = net(tokens), net(other)
    assert a.shape == (2, 20, 258)
    assert torch.allclose(a[:, :12], b[:, :12], atol=1e-6)
    assert not torch.allclose(a[:, 12], b[:, 12], atol=1e-3)


def test_logits_depend_on_every_token_before_and_on_its_place() -> None:
    net = tiny()
    embedded = net.embed(torch.randint(257, (1, 8))).detach().requires_grad_()
    h = embedded
    for child in list(net.children())[1:]:
        h = child(h)
    (gradient,) = torch.autograd.grad(h[0, -1].square().sum(), embedded)
    assert (gradient[0].abs().sum(-1) > 0).all()
    with torch.no_grad():
        first, second = net(torch.tensor([[5, 6, 7], [6, 5, 7]]))[:, -1]
    assert not torch.allclose(first, second, atol=1e-4)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 6, 1, 8)
    products = rotate(query, 1e4)[0, :, 0] @ rotate(key, 1e4)[0, :, 0].T
    assert torch.allclose(products[:-1, :-1], products[1:, 1:])
    assert not torch.allclose(products[0, 0], products[0, 1])


def test_key_and_value_heads_are_shared_by_neighbouring_query_heads() -> None:
    shared = tiny().block_0.attention
    full = tiny(kv_heads=4).block_0.attention
    weights = shared.state_dict()
    for name in ("key.weight", "value.weight"):
        weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    x = torch.randn(2, 5, 32)
    assert torch.allclose(shared(x), full(x), atol=1e-6)


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not() -> None:
    tied, untied = tiny(tie=True), tiny(tie=False)
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight


def test_the_blocks_are_what_is_sharded_one_by_one() -> None:
    net = tiny()
    assert [name for name, _ in net.named_children()] == ["embed", "block_0", "block_1", "norm", "head"]
    assert net.shard_units() == [net.block_0, net.block_1]
    assert all(isinstance(unit, Block) for unit in net.shard_units())


def test_under_bf16_the_norms_and_the_stream_stay_fp32(recwarn: pytest.WarningsRecorder) -> None:
    net, tokens = tiny(), torch.randint(257, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        stream = net.block_0(net.embed(tokens))
        logits = net(tokens)
    assert stream.dtype == torch.float32
    assert torch.allclose(logits.float(), net(tokens), atol=0.05)
    assert [str(warning.message) for warning in recwarn if "rms_norm" in str(warning.message)] == []


# The tokens


def test_bytes_are_tokens_and_back(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bytes", "unused", "unused", 258)
    (tokens,) = tokenizer.encode(["naïve 中"])
    assert list(tokens) == list("naïve 中".encode())
    assert tokenizer.decode([*tokens, tokenizer.end]) == "naïve 中"
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocabulary) == (256, 257, 258)


def made_tokenizer(file: Path, *special: str) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[*special], initial_alphabet=alphabet)
    made.train_from_iterator(["the quick brown fox"] * 9, trainer)
    made.save(str(file))
    return file


def test_a_hugging_face_tokenizer_is_read_from_its_file(tmp_path: Path) -> None:
    file = str(made_tokenizer(tmp_path / "tokenizer.json", "<begin>", "<end>"))
    tokenizer = open_tokenizer(file, "<begin>", "<end>", 300)
    (tokens,) = tokenizer.encode(["the quick 中"])
    assert len(tokens) < len("the quick 中".encode()) and (tokenizer.begin, tokenizer.end) == (0, 1)
    assert tokenizer.decode([tokenizer.begin, *tokens, tokenizer.end]) == "the quick 中"


def test_a_tokenizer_whose_ids_have_gaps_is_as_large_as_its_highest_id(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<b>": 0, "<e>": 1, "a": 2, "z": 9000}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    file = str(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"tokenizer\.json has 9001 tokens, and params\.model\.vocabulary is 9000"):
        open_tokenizer(file, "<b>", "<e>", 9000)
    assert open_tokenizer(file, "<b>", "<e>", 9001).encode(["z"]) == [[9000]]


def test_what_a_tokenizers_file_says_of_truncation_and_padding_is_not_done(tmp_path: Path) -> None:
    file = made_tokenizer(tmp_path / "tokenizer.json", "<begin>", "<end>")
    texts = ["the quick brown fox", "fox"]
    expected = open_tokenizer(str(file), "<begin>", "<end>", 300).encode(texts)
    used = tokenizers.Tokenizer.from_file(str(file))
    used.enable_truncation(2)
    used.enable_padding()
    used.save(str(file))
    assert open_tokenizer(str(file), "<begin>", "<end>", 300).encode(texts) == expected
    assert len({len(tokens) for tokens in expected}) == 2


def test_tokens_of_other_ends_are_another_copy(tmp_path: Path) -> None:
    file = str(made_tokenizer(tmp_path / "tokenizer.json", "ab", "c", "a", "bc"))
    one, other = (open_tokenizer(file, *ends, 300).fingerprint for ends in (("ab", "c"), ("a", "bc")))
    assert one != other


# The data


def test_packed_documents_are_those_of_the_file_in_its_order(texts: Path) -> None:
    corpus = open_corpus(texts, ByteTokenizer(), 0.3)
    training, held_out = read(corpus)
    assert sorted(training + held_out, key=lambda text: int(text.split()[1])) == list(documents(texts))
    assert [text for text in documents(texts) if text in training] == training
    assert (corpus.documents, corpus.held_out) == (40, len(held_out))
    assert 5 < len(held_out) < 20
    assert corpus.held_out_bytes == sum(len(text) for text in held_out)


def test_equal_documents_count_once_and_are_never_on_both_sides(texts: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text(texts.read_text() + "\n" + texts.read_text())
    once, both = (open_corpus(file, ByteTokenizer(), 0.3) for file in (texts, twice))
    assert read(both) == read(once)
    assert both.sha256 == once.sha256 and both.documents == 40


def test_the_split_of_a_document_does_not_depend_on_the_others(texts: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.jsonl"
    half.write_text("".join(texts.read_text().splitlines(keepends=True)[::2]))
    whole_held_out = read(open_corpus(texts, ByteTokenizer(), 0.3))[1]
    assert read(open_corpus(half, ByteTokenizer(), 0.3))[1] == [t for t in whole_held_out if t in set(documents(half))]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"txt": "a"}', '{"text": null}', '{"text": 1}', '{"text": "\\ud800"}', b'{"text": "\xff"}'],
    ids=repr,
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str | bytes) -> None:
    file = write(tmp_path / "a.jsonl", "good", "too")
    with file.open("ab") as opened:
        opened.write(b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(InputError, match=r"a\.jsonl:4: expected \{\"text\": \"\.\.\.\"\}, found ") as caught:
        open_corpus(file, ByteTokenizer(), 0.5)
    assert "\n" not in str(caught.value)
    assert not list(file.with_name("a.jsonl.tokens").glob("*/corpus.json"))


def test_a_file_with_nothing_on_one_side_of_the_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl: with held_out 0\.5, [01] of 1 documents are for validation"):
        open_corpus(write(tmp_path / "a.jsonl", "one"), ByteTokenizer(), 0.5)


def all_of(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, target = zip(*(samples[i] for i in range(len(samples))), strict=True)
    return torch.cat(tokens), torch.cat(target)


def test_each_token_is_a_target_once(texts: Path) -> None:
    corpus = open_corpus(texts, ByteTokenizer(), 0.3)
    stream = np.fromfile(corpus.folder / "held_out.bin", corpus.dtype).astype(np.int64)
    for length in (8, 17, len(stream), len(stream) + 6):
        windows = corpus.validation(length, packed=True)
        tokens, target = all_of(windows)
        assert len(tokens) == len(target) == (length - 1) * len(windows)
        assert torch.equal(tokens[: windows.targets], torch.from_numpy(stream[:-1]))
        assert torch.equal(target[: windows.targets], torch.from_numpy(stream[1:]))
        assert (target[windows.targets :] == IGNORED).all()


def test_training_windows_are_all_full(texts: Path) -> None:
    windows = open_corpus(texts, ByteTokenizer(), 0.3).training(17, packed=True)
    assert len(windows) == windows.targets // 16 > 5
    assert all((target != IGNORED).all() and len(tokens) == 16 for tokens, target in map(windows.__getitem__, range(5)))


# A document a sample, as minimind has it


def published_sample(text: str, length: int) -> tuple[list[int], list[int]]:
    """Inputs and labels of dataset/lm_dataset.py's PretrainDataset, written down anew, shifted as the model does it."""
    tokens = [256, *list(text.encode())[: length - 2], 257]
    ids = tokens + [0] * (length - len(tokens))
    labels = [token if place < len(tokens) else -100 for place, token in enumerate(ids)]
    return ids[:-1], labels[1:]


def test_a_sample_is_a_document_that_is_cut_or_filled_up_as_minimind_has_it(texts: Path) -> None:
    corpus = open_corpus(texts, ByteTokenizer(), 0.3)
    training, _ = read(corpus)
    assert {len(text) for text in training} == {10, 11}
    for length in (6, 12, 13, 20):
        samples = corpus.training(length, packed=False)
        assert len(samples) == len(training)
        for i, text in enumerate(training):
            tokens, target = samples[i]
            expected, labels = published_sample(text, length)
            assert target.tolist() == labels
            known = [place for place, label in enumerate(labels) if label != IGNORED]
            assert [tokens[place].item() for place in known] == [expected[place] for place in known]


def test_held_out_documents_go_on_in_the_next_sample_and_each_token_is_a_target_once(texts: Path) -> None:
    corpus = open_corpus(texts, ByteTokenizer(), 0.3)
    _, held_out = read(corpus)
    for length in (3, 6, 12, 13, 40):
        samples = corpus.validation(length, packed=False)
        _, target = all_of(samples)
        targets = target[target != IGNORED].tolist()
        assert targets == [token for text in held_out for token in (*text.encode(), 257)]
        assert samples.targets == len(targets)
        assert {samples[i][0][0].item() for i in range(len(samples))} == {256}


def test_a_document_without_a_token_is_a_begin_and_an_end(texts: Path) -> None:
    with texts.open("a") as file:
        file.write('{"text": ""}\n')
    corpus = open_corpus(texts, ByteTokenizer(), 0.3)
    both = (corpus.training(6, packed=False), corpus.validation(6, packed=False))
    targets = [samples[i][1].tolist() for samples in both for i in range(len(samples))]
    assert [target for target in targets if target[0] == 257] == [[257, *[IGNORED] * 4]]


def test_what_fills_a_sample_up_costs_nothing_and_moves_nothing() -> None:
    net = tiny()
    tokens = torch.tensor([[256, 1, 2, 3, 0, 0]])
    target = torch.tensor([[1, 2, 3, 257, IGNORED, IGNORED]])
    filled_up, plain = cross_entropy(net(tokens), target), cross_entropy(net(tokens[:, :4]), target[:, :4])
    assert torch.allclose(filled_up, plain, atol=1e-6)


# Windows and their workers


def test_windows_travel_to_a_loader_worker_as_a_path(texts: Path) -> None:
    for packed in (True, False):
        windows = open_corpus(texts, ByteTokenizer(), 0.3).training(16, packed)
        pickled = pickle.dumps(windows)
        assert len(pickled) < 500
        assert torch.equal(pickle.loads(pickled)[1][0], windows[1][0])


def test_a_changed_file_is_packed_anew_and_an_unchanged_one_is_not(texts: Path) -> None:
    first = open_corpus(texts, ByteTokenizer(), 0.3)
    inode = (first.folder / "training.bin").stat().st_ino
    assert (open_corpus(texts, ByteTokenizer(), 0.3).folder / "training.bin").stat().st_ino == inode
    assert open_corpus(texts, ByteTokenizer(), 0.2).folder != first.folder
    time.sleep(0.02)  # more than the clock of a file system steps by
    with texts.open("a") as opened:
        opened.write('{"text": "one more"}\n')
    assert open_corpus(texts, ByteTokenizer(), 0.3).documents == 41
    assert sum(map(len, read(first))) == 40  # what a running job has open stays as it was


def _open_in_process(file: Path, barrier, results) -> None:
    barrier.wait()
    corpus = open_corpus(file, ByteTokenizer(), 0.3)
    results.put((corpus.documents, (corpus.folder / "training.bin").stat().st_ino))


@pytest.mark.parametrize("packs", ["this process", "another process"])
def test_the_watchdog_sees_that_a_copy_grows_whoever_makes_it(
    packs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(data, "CHUNK", 1)
    file = write(tmp_path / "a.jsonl", *(f"{number}" * 20_000 for number in range(8)))  # each more than a file's buffer
    context = multiprocessing.get_context("fork")
    beats, packing = context.Semaphore(0), context.Event()

    class Waits(ByteTokenizer):
        def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
            packing.set()
            assert beats.acquire(timeout=60)  # one for what was written before
            return super().encode(texts)

    other = context.Process(target=open_corpus, args=(file, Waits(), 0.3))
    if packs == "another process":
        other.start()
        assert packing.wait(timeout=60)
    assert open_corpus(file, Waits(), 0.3, beats.release).documents == 8
    if packs == "another process":
        other.join(timeout=60)
        assert other.exitcode == 0


def test_processes_that_start_together_pack_once(texts: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_open_in_process, args=(texts, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(timeout=30)
    assert len(answers) == 1  # one file: the same inode for both
    assert answers.pop()[0] == 40
    assert not list(texts.with_name("a.jsonl.tokens").glob("*.tmp"))


def test_what_a_killed_packer_left_behind_is_cleared_away(texts: Path) -> None:
    leftover = texts.with_name("a.jsonl.tokens") / f".{socket.gethostname()}.tmp"
    leftover.mkdir(parents=True)
    (leftover / "training.bin").write_bytes(b"half")
    assert open_corpus(texts, ByteTokenizer(), 0.3).documents == 40
    assert not leftover.exists()


def test_a_longer_file_takes_no_more_memory_to_pack(tmp_path: Path) -> None:
    peaks = []
    for size in (4_000, 16_000):
        file = write(tmp_path / f"{size}.jsonl", *(f"{number} " * 50 for number in range(size)))
        tracemalloc.start()
        assert open_corpus(file, ByteTokenizer(), 0.3).documents == size
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_the_small_data_set_has_each_paragraph_once(tmp_path: Path) -> None:
    file = tmp_path / "topics" / "topics.jsonl"
    write_topics(file)
    before = file.stat().st_mtime_ns
    write_topics(file)
    assert file.stat().st_mtime_ns == before
    assert [path.name for path in file.parent.iterdir()] == ["topics.jsonl"]
    paragraphs = list(documents(file))
    assert len(paragraphs) == len(set(paragraphs)) > 1000
    assert open_corpus(file, ByteTokenizer(), 0.05).documents == len(paragraphs)


# The samples


def test_draws_are_among_the_likeliest_and_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(draw(logits, 0, 0, generator).tolist()) == {3}
    assert set(draw(logits, 1.0, 2, generator).tolist()) == {2, 3}
    counts = torch.bincount(draw(logits, 1.0, 0, generator), minlength=4) / 4000
    assert torch.allclose(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.03)
    colder = torch.bincount(draw(logits, 0.5, 0, generator), minlength=4) / 4000
    assert torch.allclose(colder, torch.tensor([1.0, 4.0, 9.0, 16.0]) / 30, atol=0.03)


def test_a_text_goes_on_from_its_prompt_and_ends_where_the_model_ends_it() -> None:
    wanted = [*b" to market", 257, *b"never seen"]
    seen = []

    def model(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return torch.nn.functional.one_hot(torch.full_like(tokens, wanted[len(seen) - 1]), 258) * 100.0

    options = {"temperature": 1.0, "top_k": 0, "window": 8, "seed": 0, "device": torch.device("cpu")}
    assert complete(model, ByteTokenizer(), "We go", new_tokens=50, samples=2, **options) == ["We go to market"] * 2
    assert seen == [6, 7, *[8] * 9]  # the begin of a text, the prompt, and at most 8 in all
    seen.clear()
    assert complete(model, ByteTokenizer(), "We go", new_tokens=3, **options) == ["We go to"]


def test_samples_are_repeatable_differ_and_leave_the_random_numbers_alone() -> None:
    options = {"temperature": 1.0, "top_k": 0, "window": 32, "device": torch.device("cpu"), "new_tokens": 20}
    net, state = tiny(), torch.get_rng_state()
    first = complete(net, ByteTokenizer(), "a", samples=2, seed=1, **options)
    assert complete(net, ByteTokenizer(), "a", samples=2, seed=1, **options) == first
    assert first[0] != first[1]
    assert complete(net, ByteTokenizer(), "a", samples=2, seed=2, **options) != first
    assert torch.equal(torch.get_rng_state(), state)


# The run

STEPS = 40
OVERRIDES = (
    f"params.steps={STEPS}",
    "params.model={vocabulary: 258, dim: 32, layers: 2, heads: 4, kv_heads: 2, hidden: 64, theta: 1e4, tie: true}",
    "params.length=32",
    "params.batch=7",  # uneven shares, and micro-batches that do not divide them
    "params.micro_batch=3",
    "params.warmup=5",
    "params.validate_every=10",
    "params.sampling.new_tokens=100",
)


def project_in(folder: Path) -> Project:
    """A folder with a copy of the experiments, as a user has it."""
    project = Project(folder)
    for variable in ("MINIMIND_DATA", "MINIMIND_TOKENIZER"):
        project.env.pop(variable, None)
    shutil.copytree(EXPERIMENTS, folder / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    return project


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path]:
    """A run of the small recipe, made smaller, that nothing interrupted."""
    project = project_in(tmp_path_factory.mktemp("finished"))
    project.jobkit("submit", "experiments/minimind.yaml", "--local", *OVERRIDES)
    (run,) = project.runs
    return project, run


def samples(run: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (run / "samples").iterdir()}


def test_an_interrupted_run_ends_as_the_uninterrupted_one(tmp_path: Path, finished: tuple[Project, Path]) -> None:
    project = project_in(tmp_path)
    process = project.start("submit", "experiments/minimind.yaml", "--local", *OVERRIDES)
    wait_for("a run directory", lambda: project.runs)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert 5 <= status(run)["step"] < STEPS
    project.jobkit("submit", "experiments/minimind.yaml", "--local", *OVERRIDES)
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["user", "finished"]
    assert weights(run) == weights(finished[1])
    assert status(run)["result"] == status(finished[1])["result"]
    assert samples(run) == samples(finished[1])
    assert logged_steps(run) == list(range(STEPS))
    assert logged_steps(run, "validation/bits_per_byte") == list(range(0, STEPS + 1, 10))


def test_a_run_shows_its_text_and_says_which_corpus_it_learnt(finished: tuple[Project, Path]) -> None:
    _, run = finished
    assert sorted(samples(run)) == [f"step_{number:08d}.txt" for number in range(0, STEPS + 1, 10)]
    assert all(text.startswith('The "for" statement') for text in samples(run).values())
    assert logged_steps(run, "sample/text_summary") == list(range(0, STEPS + 1, 10))
    corpus = open_corpus(finished[0].path / "data" / "topics" / "topics.jsonl", ByteTokenizer(), 0.05)
    assert events(run)[-1]["result"]["corpus"] == corpus.sha256


def test_generation_writes_every_sample_and_finds_the_trainings_own_cost(finished: tuple[Project, Path]) -> None:
    project, run = finished
    project.jobkit(
        "submit",
        "experiments/minimind_generate.yaml",
        "--local",
        f"params.run={run}",
        "params.prompts=[one, two, three]",
        "params.samples=2",
        "params.sampling.new_tokens=5",
    )
    (generated,) = (one for one in project.runs if one.name.startswith("minimind_generate"))
    for number, prompt in enumerate(["one", "two", "three"]):
        for sample in range(2):
            text = samples(generated)[f"{number:04d}_{sample:04d}.txt"]
            assert text.startswith(prompt) and len(text) > len(prompt) + 1
    assert len(samples(generated)) == 6
    assert status(generated)["result"] == status(run)["result"]
    # Once more, without jobkit: exact bits of every held-out byte and end.
    net = tiny()
    load_weights(net, run)
    corpus = open_corpus(project.path / "data" / "topics" / "topics.jsonl", ByteTokenizer(), 0.05)
    windows, nats = corpus.validation(32, packed=True), 0.0
    with torch.no_grad():
        for i in range(len(windows)):
            tokens, target = windows[i]
            nats += cross_entropy(net(tokens[None]), target[None]).item() * int((target != IGNORED).sum())
    assert status(run)["result"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / corpus.held_out_bytes, rel=1e-5)
