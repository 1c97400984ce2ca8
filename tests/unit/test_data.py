"""The same samples in the same order with the same random numbers, whatever the ranks, workers and resumes."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

from jobkit.checkpoint.state import rng_state
from jobkit.errors import JobkitError
from jobkit.train.data import Loader
from jobkit.train.nested import batch_size, cut, to_device
from jobkit.train.order import SampleOrder
from jobkit.train.seeds import derive_seed, seed_generators

WORLD_SIZES = [1, 2, 3, 5]
SIZES = [(1, 1), (7, 3), (10, 5), (13, 4), (5, 8), (97, 16), (3, 20)]
"""(length of the dataset, global batch size)."""


class Augmented(Dataset[Any]):
    """Sample `i` is [i, and a random number of each of the three generators that augmentations draw from]."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def generators() -> tuple[Any, ...]:
    """The state of this process's random numbers, to compare."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, list(keys), *rest)


def take(loader: Loader, count: int) -> list[list[list[float]]]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


# The order of samples


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("length", "size"), SIZES)
def test_every_sample_comes_exactly_once_an_epoch(length: int, size: int, shuffle: bool) -> None:
    order = SampleOrder(length, size, seed=3, shuffle=shuffle)
    epochs = 4
    stream = [one for number in range(epochs * length // size + 1) for one in order.batch(number)][: epochs * length]
    assert Counter(stream) == Counter((epoch, sample) for epoch in range(epochs) for sample in range(length))
    assert [epoch for epoch, _ in stream] == sorted(epoch for epoch, _ in stream)


def test_epochs_and_seeds_differ_in_their_order_and_nothing_else_does() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [sample for _, sample in SampleOrder(50, 50, seed, shuffle=True).batch(number)]

    orders = [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert epoch(2, 1) == epoch(2, 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("length", "size"), SIZES)
def test_the_ranks_shares_are_the_global_batch_in_order(length: int, size: int, world_size: int) -> None:
    order = SampleOrder(length, size, seed=0, shuffle=True)
    for number in range(5):
        shares = [order.share(number, rank, world_size) for rank in range(world_size)]
        assert list(itertools.chain.from_iterable(shares)) == order.batch(number)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_batch_does_not_depend_on_which_was_asked_for_before() -> None:
    order = SampleOrder(13, 4, seed=0, shuffle=True)
    forwards = [order.batch(number) for number in range(12)]
    assert [order.batch(number) for number in reversed(range(12))] == forwards[::-1]


def test_without_shuffling_the_samples_come_as_they_lie() -> None:
    order = SampleOrder(5, 3, seed=0, shuffle=False)
    assert [sample for number in range(5) for _, sample in order.batch(number)] == [*range(5)] * 3


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(JobkitError, match="empty"):
        Loader(Augmented(0), global_batch_size=1)


def test_a_global_batch_too_small_for_the_ranks_is_refused() -> None:
    with pytest.raises(JobkitError, match="global_batch_size 2"):
        Loader(Augmented(), global_batch_size=2, world_size=3)


def test_seeds_do_not_depend_on_the_process() -> None:
    assert derive_seed(1, "order", 2) == 1671847539343688486  # another value would change every resumed run
    assert len({derive_seed(*parts) for parts in [(1,), ("1",), (1, 1), (11,), ()]}) == 5


# The loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_at_any_position_goes_on_with_the_same_stream(workers: int) -> None:
    whole = take(Loader(Augmented(), global_batch_size=6, seed=1), 10)
    for position in range(0, 10, 1 if workers == 0 else 4):
        before = Loader(Augmented(), global_batch_size=6, seed=1, num_workers=workers)
        assert take(before, position) == whole[:position]
        after = Loader(Augmented(), global_batch_size=6, seed=1, num_workers=workers)
        after.load_state_dict(before.state_dict())
        assert take(after, 10 - position) == whole[position:]
        assert after.position == 10


def test_what_the_workers_have_read_ahead_is_not_counted_as_used() -> None:
    loader = Loader(Augmented(), global_batch_size=6, num_workers=2)
    next(loader)
    assert loader.state_dict()["position"] == 1


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_augmentation_is_the_same_for_any_number_of_workers_and_ranks(workers: int) -> None:
    def loader(**options: int) -> Loader:
        return Loader(Augmented(), global_batch_size=6, seed=1, **options)

    whole = take(loader(), 8)
    assert take(loader(num_workers=workers), 8) == whole
    shares = [take(loader(num_workers=workers, rank=rank, world_size=3), 8) for rank in range(3)]
    assert [list(itertools.chain.from_iterable(parts)) for parts in zip(*shares, strict=True)] == whole


def test_a_sample_looks_different_in_each_epoch_and_for_each_seed() -> None:
    def looks(seed: int) -> list[tuple[float, ...]]:
        stream = itertools.chain.from_iterable(take(Loader(Augmented(4), global_batch_size=4, seed=seed), 3))
        return [tuple(sample[1:]) for sample in stream]

    assert len({*looks(0), *looks(1)}) == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainings_random_numbers_are_untouched(workers: int) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    random.gauss(), np.random.randn()  # each keeps a second number, for the next call
    before = generators()
    take(Loader(Augmented(), global_batch_size=6, num_workers=workers), 5)
    assert generators() == before


def test_random_numbers_are_put_back_when_a_sample_cannot_be_read() -> None:
    class Damaged(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            super().__getitem__(index)
            raise OSError(f"sample {index}")

    before = generators()
    with pytest.raises(OSError, match="sample"):
        next(Loader(Damaged(), global_batch_size=6))
    assert generators() == before


class Batched(Augmented):
    """Loads its samples together, as a table does, and says so."""

    def __init__(self, length: int = 23) -> None:
        super().__init__(length)
        self.asked: list[list[int]] = []

    def __getitems__(self, ids: list[int]) -> list[torch.Tensor]:
        self.asked.append(ids)
        return [self[one] for one in ids]


def test_a_dataset_that_loads_samples_together_is_asked_once_a_batch() -> None:
    data = Batched()
    loader = Loader(Subset(data, range(5, 20)), global_batch_size=6, seed=1)
    batches = take(loader, 3)
    assert data.asked == [[int(sample[0]) for sample in batch] for batch in batches]
    again = Loader(Subset(Batched(), range(5, 20)), global_batch_size=6, seed=1)
    again.load_state_dict({**loader.state_dict(), "position": 1})
    assert take(again, 2) == batches[1:]


def test_a_part_of_a_dataset_is_augmented_sample_by_sample() -> None:
    """torch's Subset loads a batch at once, and would let each sample's numbers depend on those before it."""
    loaders = [Loader(Subset(Augmented(), range(12)), global_batch_size=size, seed=1) for size in (4, 6)]
    four, six = (
        [sample for batch in take(loader, 12 // size) for sample in batch]
        for loader, size in zip(loaders, (4, 6), strict=True)
    )
    assert four == six


def test_loaders_of_one_run_draw_different_orders_and_random_numbers() -> None:
    one, two = (take(Loader(Augmented(), global_batch_size=23, name=name), 1)[0] for name in ("0", "1"))
    assert [sample[0] for sample in one] != [sample[0] for sample in two]
    assert sorted(sample[0] for sample in one) == sorted(sample[0] for sample in two)
    assert not {sample[1] for sample in one} & {sample[1] for sample in two}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "1"}, "has name 1, this one 0: not the same samples"),
        ({"order": "as it lies, version 2"}, "has the order 'as it lies, version 2', this one 'shuffled, version 2'"),
        ({"sharing": "whole"}, "reads a stream and this one does not"),
    ],
)
def test_the_state_of_another_order_is_refused(changed: dict[str, str], message: str) -> None:
    loader = Loader(Augmented(), global_batch_size=6, name="0")
    with pytest.raises(JobkitError, match=message):
        loader.load_state_dict({**loader.state_dict(), **changed})


def test_the_state_of_a_jobkit_with_another_order_is_refused() -> None:
    with pytest.raises(JobkitError, match="by an older jobkit, whose loader had another order"):
        Loader(Augmented(), global_batch_size=6).load_state_dict({"position": 3, "length": 23, "global_batch_size": 6})


# Options


def is_worker(number: int) -> None:
    random.seed(number)
    Augmented.worker = number  # type: ignore[attr-defined]


class InWorker(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(getattr(Augmented, "worker", -1))


def test_the_options_of_dataloader_reach_it() -> None:
    options = {"num_workers": 1, "prefetch_factor": 1, "persistent_workers": True, "timeout": 60.0}
    options |= {"multiprocessing_context": "fork", "worker_init_fn": is_worker, "pin_memory": False}
    loader = Loader(InWorker(), global_batch_size=2, collate_fn=tuple, **options)
    assert [int(sample) for sample in next(loader)] == [0, 0]


REFUSED = [
    ({"num_wokers": 2}, "takes no num_wokers; did you mean 'num_workers'?"),
    ({"weigths": [1.0]}, "takes no weigths; did you mean 'weights'?"),
    ({"batch_size": 4}, "takes no batch_size: give global_batch_size"),
    ({"sampler": None}, "takes no sampler: give weights=... to draw with replacement"),
    ({"drop_last": True}, "takes no drop_last: leave it out: the loader is endless"),
    ({"generator": None}, "takes no generator: leave it out: the order follows from the YAML's seed"),
    ({"shuffle": "yes"}, "shuffle='yes' of ctx.loader: expected True or False"),
    ({"shuffle": False, "weights": [1.0] * 23}, "leave shuffle=False out"),
    ({"num_workers": -1}, "num_workers=-1 of ctx.loader: expected a whole number of at least 0"),
    ({"collate_fn": 3}, "collate_fn=3 of ctx.loader: expected a function"),
    ({"prefetch_factor": 2}, "prefetch_factor of ctx.loader needs workers"),
    ({"multiprocessing_context": "forksever", "num_workers": 1}, "expected one of .*; did you mean 'forkserver'?"),
    ({"sharded": True}, "sharded of ctx.loader is for streams"),
    ({"global_batch_size": 0}, "needs global_batch_size, the samples of a batch over all ranks, and got none"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_an_option_that_cannot_be_is_refused_in_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobkitError, match=message) as refusal:
        Loader(Augmented(), **{"global_batch_size": 6, **options})
    assert "\n" not in str(refusal.value)


def test_what_cannot_be_sent_to_a_spawned_worker_is_refused_in_a_line() -> None:
    loader = Loader(
        Augmented(), global_batch_size=6, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda batch: batch
    )
    with (
        pytest.warns(UserWarning),
        pytest.raises(JobkitError, match=r"cannot be started.*multiprocessing_context='fork'"),
    ):
        next(loader)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1, 2]), "can be read once and not again from its beginning"),
        (DataLoader(Augmented()), "was given a DataLoader: give it that one's dataset"),
        (3, "takes a Dataset or an IterableDataset, and was given a int"),
        (Dataset(), "has no length: give it __len__"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(JobkitError, match=message):
        Loader(dataset, global_batch_size=6)


@pytest.mark.parametrize(("key", "state"), [("length", (24, 6)), ("global_batch_size", (23, 5))])
def test_the_state_of_another_dataset_is_refused_by_what_differs(key: str, state: tuple[int, int]) -> None:
    other = Loader(Augmented(state[0]), global_batch_size=state[1]).state_dict()
    loader = Loader(Augmented(), global_batch_size=6)
    with pytest.raises(JobkitError, match=key):
        loader.load_state_dict(other)
    assert loader.position == 0


def test_a_state_is_taken_over_on_another_number_of_ranks() -> None:
    loader = Loader(Augmented(), global_batch_size=6)
    take(loader, 3)
    state, rest = loader.state_dict(), take(loader, 2)
    halves = [Loader(Augmented(), global_batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    assert [first + second for first, second in zip(*(take(half, 2) for half in halves), strict=True)] == rest


def test_the_epoch_counts_samples() -> None:
    loader = Loader(Augmented(20), global_batch_size=5)
    take(loader, 6)
    assert loader.epoch == 1.5


class Pair(NamedTuple):
    left: Any
    right: Any


class Images(list[Any]):
    """A list of the user's own, as some detection libraries have."""


class Point(NamedTuple):
    x: torch.Tensor


class ScaledPoint(Point):
    """torch's pytree knows named tuples and not what derives from them."""


@pytest.mark.parametrize("kind", [lambda one: Images([one]), ScaledPoint])
def test_the_users_own_lists_and_tuples_are_batches_too(kind: Any) -> None:
    batch = kind(torch.arange(4))
    part = cut(batch, 1, 3)
    assert type(part) is type(batch) and part[0].tolist() == [1, 2] and batch_size(batch) == 4
    assert to_device(batch, torch.device("meta"))[0].device.type == "meta"


def test_a_batch_keeps_its_shape_on_its_way_to_the_device_and_when_it_is_cut() -> None:
    one = torch.ones(3)
    batch = {
        "list": [one, "text"],
        "tuple": (one, 3),
        "named": Pair(one, None),
        "ordered": OrderedDict(x=one),
        "bytes": b"x",
    }
    moved, part = to_device(batch, torch.device("meta")), cut(batch, 1, 3)
    for found in (moved, part):
        assert [type(found[key]) for key in batch] == [list, tuple, Pair, OrderedDict, bytes]
        assert (found["list"][1], found["tuple"][1], found["named"].right, found["bytes"]) == ("text", 3, None, b"x")
    for found, device, size in ((moved, "meta", 3), (part, "cpu", 2)):
        tensors = [found["list"][0], found["tuple"][0], found["named"].left, found["ordered"]["x"]]
        assert [(tensor.device.type, len(tensor)) for tensor in tensors] == [(device, size)] * 4
    assert (batch_size(batch), batch_size(part)) == (3, 2)


def test_a_mapping_of_a_librarys_own_is_looked_into() -> None:
    batch = UserDict(ids=torch.arange(4), inner=UserDict(mask=torch.ones(4, 2)))  # what tokenizers return is one
    assert cut([batch], 0, 3)[0]["inner"]["mask"].shape == (3, 2)
    assert to_device(batch, torch.device("meta"))["ids"].device.type == "meta"
    assert batch_size(batch) == 4


class Graphs:
    """A batch of a library's own: its length is the number of its fields, and a slice of it a list."""

    def __init__(self, x: torch.Tensor, owner: torch.Tensor) -> None:
        self.x, self.owner = x, owner

    @property
    def num_graphs(self) -> int:
        return int(self.owner.max()) + 1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: slice) -> list[Any]:
        return [self.x[self.owner == one] for one in range(key.start, key.stop)]

    def to(self, device: torch.device, non_blocking: bool = False) -> Graphs:
        self.moved_beside = non_blocking
        return Graphs(self.x.to(device), self.owner.to(device))


class Boxes:
    """One that can be cut, and knows nothing of non_blocking."""

    def __init__(self, corners: torch.Tensor) -> None:
        self.corners = corners

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, key: slice) -> Boxes:
        return Boxes(self.corners[key])

    def to(self, device: torch.device) -> Boxes:
        return Boxes(self.corners.to(device))


def test_objects_that_move_themselves_are_moved_and_cut() -> None:
    graphs, boxes = Graphs(torch.zeros(7), torch.tensor([0, 0, 1, 2, 2, 3, 3])), Boxes(torch.zeros(4, 2))
    batch = {"graphs": graphs, "boxes": [boxes]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["graphs"].x.device.type == moved["boxes"][0].corners.device.type == "meta"
    assert batch_size(batch) == batch_size(boxes) == 4
    assert cut(graphs, 0, 4) is graphs and len(cut([boxes], 1, 3)[0]) == 2
    with pytest.raises(JobkitError, match=r"a batch is a Graphs, which cannot be cut .* batch\[1:3\] is a list"):
        cut(batch, 1, 3)


def test_an_object_that_tells_no_size_is_refused_by_its_name() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(JobkitError, match="a PackedSequence, which does not tell how many samples"):
        batch_size(packed)
    assert type(to_device(packed, torch.device("cpu"))) is type(packed)


@pytest.mark.parametrize(("device", "beside"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)])
def test_only_devices_with_streams_are_copied_to_beside_the_program(device: str, beside: bool) -> None:
    """What is asked of a tensor and of an object: there is no such device here."""
    asked: list[Any] = []

    class Spy(torch.Tensor):
        def to(self, *args: Any, **options: Any) -> Any:
            asked.append(options.get("non_blocking", False))
            return self

    class Object:
        def to(self, device: torch.device, non_blocking: bool = False) -> Any:
            asked.append(non_blocking)
            return self

    to_device([torch.zeros(2).as_subclass(Spy), Object()], torch.device(device))
    assert asked == [beside, beside]


def test_a_mapping_with_attributes_keeps_them() -> None:
    class Encoding(UserDict[str, Any]):
        """As BatchEncoding of transformers, whose constructor takes more than a mapping."""

        def __init__(self, data: dict[str, Any], tokenizer: str) -> None:
            super().__init__(data)
            self.tokenizer = tokenizer

    batch = Encoding({"ids": torch.arange(4), "text": "x"}, "bpe")
    for found, size in ((to_device(batch, torch.device("meta")), 4), (cut(batch, 1, 3), 2)):
        assert type(found) is Encoding and found.tokenizer == "bpe" and len(found["ids"]) == size
    assert batch["ids"].device.type == "cpu" and len(batch["ids"]) == 4, "the batch itself was changed"


def test_a_mapping_that_keeps_its_values_in_a_dict_is_left_as_it_was() -> None:
    class Fields(MutableMapping[str, Any]):
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

        def __getitem__(self, key: str) -> Any:
            return self.fields[key]

        def __setitem__(self, key: str, value: Any) -> None:
            self.fields[key] = value

        def __delitem__(self, key: str) -> None:
            del self.fields[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.fields)

        def __len__(self) -> int:
            return len(self.fields)

    batch = Fields(ids=torch.arange(4))
    assert [cut(batch, start, start + 2)["ids"].tolist() for start in (0, 2)] == [[0, 1], [2, 3]]


class Habits(Dataset[Any]):
    """What datasets do in workers: open something by worker_init_fn, change with the epoch, fail once."""

    def __init__(self, broken: int = -1) -> None:
        self.level, self.opened, self.broken = 0, False, broken

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise OSError("cannot be read")
        return {"index": index, "level": self.level, "opened": self.opened}


class Told(Dataset[Any]):
    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.told[-1]


def test_an_epoch_of_draws_is_as_long_as_the_dataset_and_each_loader_tells_its_own() -> None:
    drawn = Loader(Told(), global_batch_size=2, weights=[1.0] * 4)
    assert [next(drawn).tolist() for _ in range(4)] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    shared = Told()
    fast, slow = (Loader(Subset(shared, range(size)), global_batch_size=2) for size in (2, 4))
    assert [(next(fast).tolist(), next(slow).tolist()) for _ in range(3)][-1] == ([2, 2], [1, 1])


class Reshuffled(Told):
    """A dataset that draws what an epoch is made of, and is told how often."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def __getitem__(self, index: int) -> Any:
        return self.drawn


class ReshuffledAtOnce(Reshuffled):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self.drawn for _ in indices]


@pytest.mark.parametrize("kind", [Reshuffled, ReshuffledAtOnce])
@pytest.mark.parametrize("weights", [None, [1.0] * 4], ids=["in order", "by draws"])
def test_a_dataset_is_told_each_epoch_once(kind: type[Reshuffled], weights: list[float] | None) -> None:
    dataset = kind()
    loader = Loader(Subset(dataset, range(4)), global_batch_size=2, weights=weights)
    for _ in range(6):
        next(loader)
    assert dataset.told == [0, 1, 2]


def test_an_epoch_draws_the_same_wherever_it_begins_and_nothing_of_the_trainings_numbers() -> None:
    def drawn(first: int) -> list[Any]:
        loader = Loader(Reshuffled(), global_batch_size=2, seed=3)
        loader.load_state_dict({**loader.state_dict(), "position": first})
        return [next(loader) for _ in range(4 - first)]

    seed_generators(1)
    before = rng_state()
    whole = drawn(0)
    assert str(rng_state()) == str(before)
    seed_generators(2)
    assert str(drawn(3)) == str(whole[3:])
    assert str(whole[0]) == str(whole[1]) != str(whole[2])


def test_loaders_of_one_dataset_agree_on_what_an_epoch_draws_whichever_begins_it() -> None:
    drawn = []
    for order in (("a", "b"), ("b", "a")):
        dataset = Reshuffled()
        loaders = [Loader(dataset, global_batch_size=4, name=name) for name in order]
        drawn.append(str([next(loader) for loader in loaders]))
        assert dataset.told == [0]
    assert drawn[0] == drawn[1]


class NotHashable(Told):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class NotReferable:
    """No weak reference to it can be made."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told: list[int] = []

    set_epoch, __len__, __getitem__ = Told.set_epoch, Told.__len__, Told.__getitem__


@pytest.mark.parametrize("kind", [NotHashable, NotReferable])
def test_any_dataset_with_set_epoch_is_told(kind: Any) -> None:
    one, other = kind(), kind()
    for loader in (Loader(one, global_batch_size=2), Loader(other, global_batch_size=2)):
        assert [next(loader).tolist() for _ in range(4)] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert one.told == other.told == [0, 1]


def open_it(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened = True


def with_noise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {**default_collate(samples), "noise": torch.rand(2)}


def test_workers_know_the_dataset_its_epoch_and_what_collate_fn_draws() -> None:
    batches = {}
    for workers in (0, 2):
        options = {"worker_init_fn": open_it, "num_workers": np.int64(2), "drop_last": False} if workers else {}
        loader = Loader(Habits(), global_batch_size=np.int64(2), timeout=None, collate_fn=with_noise, **options)
        batches[workers] = [next(loader) for _ in range(6)]
        assert [batch["opened"].all().item() for batch in batches[workers]] == [bool(workers)] * 6
    for alone, loaded in zip(batches[0], batches[2], strict=True):
        assert alone["level"].tolist() == loaded["level"].tolist() and torch.equal(alone["noise"], loaded["noise"])
    assert [batch["level"].unique().tolist() for batch in batches[2]] == [[0], [0], [1], [1], [2], [2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_loaded_counts_as_drawn(workers: int) -> None:
    loader = Loader(Habits(broken=2), global_batch_size=1, shuffle=False, num_workers=workers)
    seen = [next(loader)["index"].item(), next(loader)["index"].item()]
    with pytest.raises(OSError, match="cannot be read"):
        next(loader)
    assert loader.position == 3
    resumed = Loader(Habits(), global_batch_size=1, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert [*seen, next(loader)["index"].item(), next(resumed)["index"].item()] == [0, 1, 3, 3]
