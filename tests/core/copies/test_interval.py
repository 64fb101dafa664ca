"""The capture interval comes back soon after captures were slow for once, and ever less often where they stay slow."""

from kit.started import bring_up

from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings

SETTINGS = Settings(world_size=2)


class Job:
    """A running job whose captures are skipped when a test says so; each interval that was told, and when."""

    def __init__(self):
        self.state = coordinator.new_state(SETTINGS)
        self.now, self.version, self.intervals = 0.0, 10, []
        self.tell(ev.JobSubmitted("here", ev.Place("here")))
        bring_up(self.state, self.tell)

    def tell(self, event):
        before = self.state.capture_interval
        effects = coordinator.step(SETTINGS, self.state, event, self.now)
        if self.state.capture_interval != before:
            self.intervals.append((self.now, self.state.capture_interval))
            told = {each.worker for each in effects if isinstance(each, do.SetCaptureInterval)}
            assert told == {member.worker for member in self.state.owners()}

    def skip(self, **told):
        self.version += 100  # due after every change so far
        worker = next(iter(self.state.owners())).worker
        self.tell(ev.CaptureSkipped(worker, self.version, **told))

    def wait(self, seconds):
        """Let time pass, with a tick at each deadline."""
        until = self.now + seconds
        while (deadline := coordinator.next_deadline(SETTINGS, self.state)) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.tell(ev.TimeAdvanced())
        self.now = until


def test_one_slow_moment_costs_seconds():
    job = Job()
    job.skip()
    job.skip()
    assert job.state.capture_interval == 4
    job.wait(2 * SETTINGS.calm_s + 1)
    assert job.state.capture_interval == 1


def test_where_captures_stay_slow_the_shorter_interval_is_tried_ever_less_often():
    job = Job()
    job.skip()
    tries = []
    for _ in range(12):
        begun, known = job.now, len(job.intervals)
        while len(job.intervals) == known:
            job.wait(0.5)
        tries.append(job.intervals[-1][0] - begun)
        job.skip()  # at once: the shorter interval is too short
    assert tries[0] == SETTINGS.calm_s
    assert tries == sorted(tries)
    assert tries[-1] == SETTINGS.max_calm_s


def test_after_a_long_calm_the_first_wait_is_short_again():
    job = Job()
    for _ in range(6):
        job.skip()
        job.wait(SETTINGS.max_calm_s)
    job.wait(10 * SETTINGS.max_calm_s)
    job.skip()
    job.wait(SETTINGS.calm_s + 1)
    assert job.state.capture_interval == 1


def test_a_lack_of_memory_is_said_once_and_lengthens_nothing():
    job = Job()
    job.skip(no_memory="no memory for a snapshot")
    job.skip(no_memory="no memory for a snapshot")
    assert not job.intervals
    assert "no memory" in job.state.reason
