"""Kinds of state in plain values, containers, arrays, tensors, iterators and generators of random numbers."""

import array
import collections
import ctypes
import decimal
import fractions
import heapq
import io
import itertools
import multiprocessing
import os
import queue
import random
import weakref

import numpy as np
import torch
from kinds_kit import kind

ARRAY = array.array("i", [0])
BYTES = bytearray(4)
TEXT, BINARY = io.StringIO(), io.BytesIO()
HEAP, RECENT, ORDERED = [], collections.deque(maxlen=100), collections.OrderedDict()
LISTS, COUNTS, SET = collections.defaultdict(list), collections.Counter(), {frozenset({1})}
CHAIN, USER_DICT, USER_LIST = collections.ChainMap({}), collections.UserDict(), collections.UserList()
FRACTIONS = [fractions.Fraction(0)]
NESTED = {"a": [{"b": [0]}]}
TUPLE = ([0], {"a": 0})
QUEUE, PRIORITIES = queue.Queue(), queue.PriorityQueue()
SHARED = multiprocessing.Value("i", 0)
NUMBER = ctypes.c_int(0)
WEAK, WEAK_VALUES, WEAK_KEYS, KEPT = weakref.WeakSet(), weakref.WeakValueDictionary(), weakref.WeakKeyDictionary(), []

RANDOM = random.Random(4)
RNG, LEGACY, SEEDS = np.random.default_rng(3), np.random.RandomState(2), np.random.SeedSequence(3)
TORCH = torch.Generator().manual_seed(5)

ROWS, POINT, OBJECTS = np.zeros(3), np.zeros(()), np.array([[0], None], dtype=object)
RECORDS = np.zeros(2, dtype=[("a", "f4"), ("b", "i4")])
TENSOR, TENSORS, WHOLE = torch.zeros(3), [torch.zeros(2)], torch.zeros(4)
VIEW, TRANSPOSED = WHOLE[1:3], torch.zeros(2, 2).t()
HALF, FLAGS, COMPLEX = (
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(4, dtype=torch.bool),
    torch.zeros(2, dtype=torch.complex64),
)

COUNTED, CHAINED, NUMBERED = itertools.count(), itertools.chain(range(100)), enumerate(range(100))
LISTED, ZIPPED, SLICED = iter(list(range(50))), zip(range(50), range(50), strict=True), itertools.islice(range(50), 40)
BACKWARDS, KEYS, LETTERS = (
    reversed(list(range(60))),
    iter({i: i for i in range(50)}),
    iter("abcdefghijklmnopqrstuvwxyz"),
)
CYCLE = itertools.cycle([1, 2, 3])


class Target:
    """A target of weak references."""


def _next(name, iterator, number=lambda value: value):
    def draw(_run):
        return number(next(iterator))

    draw.__name__ = name
    kind(draw)


_next("counted", COUNTED)
_next("chained", CHAINED)
_next("numbered", NUMBERED, lambda pair: pair[0])
_next("listed", LISTED)
_next("zipped", ZIPPED, lambda pair: pair[0])
_next("sliced", SLICED)
_next("backwards", BACKWARDS)
_next("of_keys", KEYS)
_next("letters", LETTERS, ord)
_next("cycle", CYCLE)


@kind
def plain_array(_run):
    ARRAY[0] += 1
    BYTES[0] += 1
    return ARRAY[0] + BYTES[0]


@kind
def files_in_memory(_run):
    TEXT.write("x")
    BINARY.seek(0, io.SEEK_END)
    BINARY.write(b"x")
    return TEXT.tell() + len(BINARY.getvalue())


@kind
def containers(run):
    heapq.heappush(HEAP, run.step)
    RECENT.append(1)
    ORDERED[run.step] = 1
    LISTS["a"].append(1)
    COUNTS["a"] += 1
    SET.add(run.step)
    return len(HEAP) + len(RECENT) + len(ORDERED) + len(LISTS["a"]) + COUNTS["a"] + len(SET)


@kind
def library_containers(_run):
    CHAIN["n"] = CHAIN.get("n", 0) + 1
    USER_DICT["n"] = USER_DICT.get("n", 0) + 1
    USER_LIST.append(1)
    return CHAIN["n"] + USER_DICT["n"] + len(USER_LIST)


@kind
def nested(_run):
    NESTED["a"][0]["b"][0] += 1
    NESTED["a"].append({})
    TUPLE[0][0] += 1
    TUPLE[1]["a"] += 1
    return len(NESTED["a"]) + NESTED["a"][0]["b"][0] + TUPLE[0][0] + TUPLE[1]["a"]


@kind
def queues(run):
    QUEUE.put(1)
    PRIORITIES.put(-run.step)
    return QUEUE.qsize() + PRIORITIES.queue[0] + 10


@kind
def numbers(_run):
    FRACTIONS[0] += fractions.Fraction(1, 3)
    decimal.getcontext().prec += 1
    NUMBER.value += 1
    SHARED.value += 1
    return int(FRACTIONS[0] * 3) + decimal.getcontext().prec + NUMBER.value + SHARED.value


@kind
def environment(_run):
    os.environ["COUNT_OF_STEPS"] = str(int(os.environ.get("COUNT_OF_STEPS", "0")) + 1)
    return int(os.environ["COUNT_OF_STEPS"])


@kind
def weak_containers(run):
    target = Target()
    KEPT.append(target)
    WEAK.add(target)
    WEAK_VALUES[run.step] = target
    WEAK_KEYS[run.model] = WEAK_KEYS.get(run.model, 0) + 1
    return len(WEAK) + len(WEAK_VALUES) + WEAK_KEYS[run.model]


@kind
def random_numbers(_run):
    RNG.standard_normal()
    drawn = int(RNG.integers(100)) + int(LEGACY.randint(100)) + int(np.random.randint(100))  # noqa: NPY002 - as scripts do
    drawn += int(SEEDS.spawn(1)[0].generate_state(1)[0]) % 97
    return drawn + RANDOM.randrange(100) + random.randrange(100) + int(torch.randint(100, (1,), generator=TORCH))


@kind
def reseeded(run):
    torch.manual_seed(run.step * 3 + random.randrange(5))
    return int(torch.randint(100, (1,))) + torch.initial_seed() % 97


@kind
def arrays(_run):
    ROWS[1] += 1
    POINT[...] += 1
    OBJECTS[0].append(1)
    RECORDS["b"][1] += 1
    return float(ROWS[1] + POINT) + len(OBJECTS[0]) + int(RECORDS["b"][1])


@kind
def tensors(_run):
    TENSOR[0] += 1
    TENSORS.append(TENSORS[-1] + 1)
    VIEW.add_(1)
    TRANSPOSED[0, 1] += 1
    return float(TENSOR[0] + TENSORS[-1][0] + WHOLE.sum() + TRANSPOSED.sum())


@kind
def uncounted_writes(_run):
    WHOLE.data[0] += 1
    TENSORS[0].numpy()[1] += 1
    return float(WHOLE[0] + TENSORS[0][1])


@kind
def other_elements(run):
    HALF.add_(1)
    FLAGS[run.step % 4] = True
    COMPLEX.add_(1j)
    return float(HALF.sum() + FLAGS.sum() + COMPLEX.imag.sum())
