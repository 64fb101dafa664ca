"""Changes in unprotected modules: an error names trained ones, and metrics get a warning unless snapshots have them."""

import gc
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


class Loop:
    """A loop whose optimizer is protected."""

    def __init__(self, **protect):
        self.protected, self.optimizer = Protected(), sgd()
        self.protected.add("optimizer", self.optimizer)
        for name, obj in protect.items():
            self.protected.add(name, obj)
        self.coverage = Coverage(self.protected, Variables().keeps)
        self.coverage.begin()

    def end(self, step):
        return self.coverage.problem(step, look=False)


HELPERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [HELPERS["StepLR"](optimizer), HELPERS["StepLR"](optimizer)], [1]
    ),
    "GradScaler": lambda _: torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("kind", HELPERS)
def test_a_helper_that_the_loop_makes_is_warned_of_at_once_and_stops_the_job_at_a_loss(kind):
    loop = Loop()
    assert loop.end(4) == ""
    loop.late = HELPERS[kind](loop.optimizer)
    with pytest.warns(RuntimeWarning, match="a loss stops the job from now on") as warned:
        assert loop.end(5) == ""
    assert len(warned) == 1
    (why,) = loop.protected.late
    assert f"'self.late' ({kind}) was made in step 5, and no snapshot holds it" in why
    assert "Create it before job.steps(), and call job.protect(late=self.late) there." in why
    with warnings.catch_warnings(action="error"):
        assert loop.end(6) == ""
    loop.late = None
    gc.collect()
    assert loop.end(7) == ""
    assert loop.protected.late == []


def test_a_helper_that_the_first_steps_make_is_refused_when_its_state_changes():
    loop = Loop()
    late = HELPERS["StepLR"](loop.optimizer)
    with warnings.catch_warnings(action="error"):
        assert loop.end(0) == ""
    late.step()
    assert "'late' (StepLR) is not protected, and its state changed in step 3" in loop.end(3)
    assert loop.protected.late == []


def test_a_helper_of_set_up_that_first_steps_late_is_refused_in_that_step():
    made = sgd()
    unused = HELPERS["StepLR"](made)
    loop = Loop()
    assert loop.end(98) == ""
    unused.step()
    assert "'unused' (StepLR) is not protected, and its state changed in step 99" in loop.end(99)


class Holder:
    """A protected object with a state, which makes a scheduler late."""

    def __init__(self):
        self.scheduler = None

    def state_dict(self):
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_helper_of_a_protected_object_and_a_disabled_one_need_no_warning():
    holder = Holder()
    loop = Loop(holder=holder)
    holder.scheduler = HELPERS["StepLR"](loop.optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with warnings.catch_warnings(action="error"):
        assert loop.end(5) == ""
    assert loop.protected.late == []
    del disabled


def test_an_optimizer_that_the_loop_makes_is_to_be_made_before():
    loop = Loop()
    second = sgd()
    loop.coverage.note(second, 8)
    assert loop.end(8) == ""
    loop.coverage.note(second, 9)
    problem = loop.end(9)
    assert "'second' (SGD) updated weights in step 9, but is not protected" in problem
    assert "Create it before job.steps(), and call job.protect(second=second) there." in problem


class Late(Loop):
    """A loop in whose steps an unprotected module changes late."""

    def __init__(self):
        self.target = torch.nn.BatchNorm1d(2)
        super().__init__()

    def changed(self):
        return self.coverage.changed()


def replace(target):
    target.weight = torch.nn.Parameter(torch.full_like(target.weight, 2))


def fill(target):
    target.weight.fill_(2)


WRITES = {
    "in place": fill,
    "load_state_dict": lambda target: target.load_state_dict({**target.state_dict(), "weight": torch.zeros(2)}),
    "a buffer": lambda target: target.running_mean.fill_(2),
    "a new parameter": replace,
    "a new buffer": lambda target: setattr(target, "running_mean", torch.ones(2)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_module_that_first_changes_late_is_named_in_that_step(write):
    loop = Late()
    assert loop.end(98) == ""
    with torch.no_grad():
        WRITES[write](loop.target)
    assert "the module 'self.target' (BatchNorm1d) is not protected" in (why := loop.end(99))
    assert "changed in step 99" in why


def test_a_write_that_changes_nothing_is_not_one():
    loop = Late()
    for step in (98, 99):
        loop.target.load_state_dict(loop.target.state_dict())
        replaced = torch.nn.Parameter(loop.target.weight.detach().clone())
        loop.target.weight = replaced
        assert loop.end(step) == ""
    assert loop.changed() == ""
    with torch.no_grad():
        replaced.fill_(2)
    assert "'weight' changed in step 99" in loop.end(99)


def test_a_module_that_has_gone_is_not_watched():
    loop = Late()
    loop.target = None
    assert loop.end(98) == loop.end(99) == loop.changed() == ""


def test_a_change_through_data_is_named_when_all_are_compared():
    loop = Late()
    loop.target.weight.data.fill_(2)
    assert loop.end(99) == ""  # torch does not count it
    assert "'weight' changed in training" in loop.changed()


def test_a_tensor_that_counts_no_writes_is_compared_with_the_others():
    loop = Late()
    with torch.inference_mode():
        made = torch.nn.BatchNorm1d(2)
    other = Late()
    assert loop.end(98) == other.end(98) == ""
    with torch.inference_mode():
        made.running_mean.fill_(2)
    assert "'made'" in other.changed()


@pytest.mark.parametrize("measures", [True, False])
def test_algorithms_that_cudnn_measures_are_warned_of(monkeypatch, measures):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", measures)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Coverage(Protected()).begin()
    assert any("cudnn.benchmark is on" in str(each.message) for each in said) == measures


def test_a_replacement_begins_with_what_it_has_after_its_rehearsal(recwarn):
    """The rank's first process had the same: a loss is no reason to refuse what does not change from then on."""
    target = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    protected = Protected()
    coverage = Coverage(protected)
    coverage.begin(rehearses=True)
    unused = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with torch.no_grad():
        target.weight.add_(1)
    assert coverage.changed() == ""
    assert coverage.problem(7, look=True) == ""
    assert coverage.changed() == ""
    assert not protected.late, unused
    assert not recwarn
    with torch.no_grad():
        target.weight.add_(1)
    assert "'weight' changed in step 8" in coverage.problem(8, look=False)
