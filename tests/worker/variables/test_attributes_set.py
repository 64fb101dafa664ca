"""The attributes that a function sets are found without decoding its instructions, and they are those that `dis` finds."""

import dis

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.worker.variables.modules import _attributes_set_in

MANY = "\n".join(["def set_many(x):", *(f"    x.a{number} = x.b{number}" for number in range(300))])
FUNCTIONS = {
    f"{kind.__name__}.{name}": function.__code__
    for kind in (DistributedDataParallel, nn.Module, nn.MultiheadAttention)
    for name, function in vars(kind).items()
    if hasattr(function, "__code__")
}


@pytest.mark.parametrize("code", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_they_are_those_that_dis_finds(code):
    assert list(_attributes_set_in(code)) == by_dis(code)


def test_a_function_with_more_names_than_a_byte_can_count():
    namespace = {}
    exec(MANY, namespace)
    code = namespace["set_many"].__code__
    assert len(by_dis(code)) == 300
    assert list(_attributes_set_in(code)) == by_dis(code)


def by_dis(code):
    return [each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"]
