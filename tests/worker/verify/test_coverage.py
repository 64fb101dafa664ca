"""Changes in unprotected modules: an error names trained ones, and metrics get a warning unless snapshots have them."""

import queue
import warnings
import weakref

import pytest
import torch

from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.variables.variables import Variables
from deadpool_run.worker.verify.coverage import Coverage


class Hidden:
    """A class of a module that is not among the script's files."""

    __module__ = "of_a_library"


class Around(torch.optim.Optimizer):
    """A wrapper of another optimizer, with hooks of its own `step()`."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}


def metric():
    made = torch.nn.Module()
    made.register_buffer("total", torch.zeros(()))
    return made


def problem_after_a_change(changed):
    variables = Variables()
    variables.begin()
    coverage = Coverage(Protected(), variables.keeps)
    coverage.begin()
    with torch.no_grad():
        changed.add_(1)
    return coverage.problem(1, look=True)


def test_a_metric_in_a_variable_needs_no_warning():
    found = metric()
    with warnings.catch_warnings(action="error"):
        assert problem_after_a_change(found.total) == ""


def test_a_metric_that_no_variable_holds_is_warned_of():
    hidden = Hidden()
    hidden.metric, hidden.queue = metric(), queue.Queue()
    total = weakref.proxy(hidden.metric.total)  # not in the assert, whose parts are variables too
    with pytest.warns(RuntimeWarning, match="total changes in training and is not protected"):
        problem = problem_after_a_change(total)
    assert problem == ""


def test_a_module_that_is_trained_is_named():
    trained = torch.nn.Linear(1, 1)
    assert "'trained'" in problem_after_a_change(trained.weight)


def test_a_buffer_of_a_module_that_trains_is_named():
    norm = torch.nn.BatchNorm1d(2)
    assert "'running_mean' changed" in problem_after_a_change(norm.running_mean)


def sgd():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_a_wrapper_is_protected_with_the_optimizer_inside():
    protected, around = Protected(), Around(Around(sgd()))
    protected.add("optimizer", around)
    coverage = Coverage(protected, Variables().keeps)
    coverage.note(around, 1)
    assert coverage.problem(1, look=False) == ""


@pytest.mark.parametrize("of_one", [sgd, lambda: Around(sgd())])
def test_an_unprotected_optimizer_and_a_wrapper_of_one_are_named(of_one):
    protected, other = Protected(), of_one()
    protected.add("optimizer", sgd())
    coverage = Coverage(protected, Variables().keeps)
    coverage.note(other, 1)
    assert "'other'" in coverage.problem(2, look=False)
