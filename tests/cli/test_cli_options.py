"""From words to one value for each option: precedence, spellings, and where the script begins."""

import pytest

from deadpool_run.cli.options.resolve import DEFAULT, Value, Values, canonical, resolve
from deadpool_run.cli.options.table import OPTIONS
from deadpool_run.errors import UsageError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", "-- train.py"),
        ("--nproc_per_node 4 train.py --lr 3", "--nproc-per-node 4 -- train.py --lr 3"),
        ("--nproc-per 4 train.py", "--nproc-per-node 4 -- train.py"),
        ("--nproc_per_node=4 -m pkg.train --nproc_per_node 9", "--nproc-per-node=4 -m -- pkg.train --nproc_per_node 9"),
        ("--standalone train.py -- -x", "--standalone -- train.py -x"),
        ("-- train.py -- -- -x", "-- train.py -- -x"),
        ("-r 3 -t3 train.py -r 1", "-r 3 -t3 -- train.py -r 1"),
        ("--help-all", "--help-all"),
        ("--nproc-per-node", "--nproc-per-node"),
        ("--max_restarts -1 train.py", "--max-restarts -1 -- train.py"),
        ("", ""),
        ("--", ""),
    ],
)
def test_a_line_has_one_spelling(line, expected):
    assert canonical(line.split()) == expected.split()


def test_the_stronger_source_wins_and_is_named():
    file = {"spares": 1, "role": "file", "run-id": "file", "tee": 3, "standalone": True}
    environment = {
        "DEADPOOL_SPARES": "2",
        "PET_SPARES": "9",  # torchrun has no such option
        "PET_ROLE": "pet",
        "DEADPOOL_TEE": "1",
        "PET_TEE": "2",
        "PET_MAX_RESTARTS": "",
    }
    values = resolve({"spares": "3", "dry_run": True, "role": None}, environment, file, "deadpool.yaml")
    assert values["spares"] == Value("3", "--spares")
    assert values["tee"] == Value("1", "DEADPOOL_TEE")
    assert values["role"] == Value("pet", "PET_ROLE")
    assert values["run_id"] == Value("file", "deadpool.yaml")
    assert values["standalone"] == Value("1", "deadpool.yaml")
    assert values["dry_run"] == Value("1", "--dry-run")
    assert values["max_restarts"] == Value("", DEFAULT)
    assert set(values._values) == {option.name for option in OPTIONS}
    without_flag = resolve({}, environment, file, "deadpool.yaml")
    assert without_flag["spares"] == Value("2", "DEADPOOL_SPARES")


def test_a_launch_inside_a_worker_does_not_take_the_outer_runs_settings():
    outer = {"DEADPOOL_WORKER": "3", "DEADPOOL_RUN_DIR": "/outer", "PET_NPROC_PER_NODE": "8"}
    values = resolve({}, outer, {})
    assert not values["run_dir"].is_set
    assert not values["nproc_per_node"].is_set


def test_torchrun_reads_no_variable_for_two_of_its_options():
    values = resolve({}, {"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "node"}, {})
    assert not values["logs_specs"].is_set
    assert not values["numa_binding"].is_set


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "on"])
def test_a_flag_is_on_in_every_usual_spelling(text):
    assert resolve({}, {"PET_STANDALONE": text}, {}).flag("standalone")


@pytest.mark.parametrize("text", ["0", "false", "no", "off"])
def test_a_flag_is_off_in_every_usual_spelling(text):
    assert not resolve({}, {"PET_STANDALONE": text}, {}).flag("standalone")


@pytest.mark.parametrize(
    ("name", "read", "text", "why"),
    [
        ("standalone", Values.flag, "maybe", "neither true nor false"),
        ("spares", lambda values, name: values.count(name, 0), "two", "not a whole number"),
        ("spares", lambda values, name: values.count(name, 0), "-1", "too small"),
        ("repair_timeout", Values.seconds, "soon", "not a duration"),
        ("repair_timeout", Values.seconds, "0", "not a positive duration"),
        ("repair_timeout", Values.seconds, "inf", "not a duration"),
        ("repair_timeout", Values.seconds, "nan", "not a duration"),
        ("hang_timeout", lambda values, name: values.seconds(name, or_zero=True), "-1", "not a duration"),
        ("hang_timeout", lambda values, name: values.seconds(name, or_zero=True), "nan", "not a duration"),
        ("color", lambda values, name: values.choice(name, ("auto",)), "blue", "not one of its values"),
    ],
)
def test_a_bad_value_names_its_source_its_text_and_what_to_write(name, read, text, why):
    variable = f"DEADPOOL_{name.upper()}"
    values = resolve({}, {variable: text}, {})
    with pytest.raises(UsageError) as caught:
        read(values, name)
    first, last = str(caught.value).split("\n")
    assert variable in first
    assert repr(text) in first
    assert why in first
    assert last.startswith("write ")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--bogus", "no such option: --bogus\nrun `deadpool-run --help`"),
        ("--nprocs=2", "no such option: --nprocs\ndid you mean --nproc-per-node? run"),
        ("--timeout", "no such option: --timeout\ndid you mean --hang-timeout, "),
        ("--r", "--r is ambiguous: it may be --role, --run-path, "),
        ("--spare", "--spare is ambiguous: it may be --spares or --spare-mode\nwrite one of them in full"),
    ],
)
def test_a_word_that_is_no_option_is_refused_with_what_it_may_mean(word, said):
    with pytest.raises(UsageError) as caught:
        canonical([word, "train.py"])
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("0.5", 0.5), (".5s", 0.5), ("250ms", 0.25), ("10m", 600), ("1.5h", 5400), ("2 d", 172800)],
)
def test_a_duration_has_a_unit_or_is_in_seconds(text, seconds):
    assert resolve({"hang_timeout": text}, {}, {}).seconds("hang_timeout") == seconds


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"spare": 1}, "did you mean `spares`?"),
        ({"zzz": 1}, "lists the options"),
        ({"dry_run": True}, "not an option that a file can set"),
        ({"spares": {"a": 1}}, "not a value for --spares"),
        ({3: 1}, "not an option"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name(content, words):
    with pytest.raises(UsageError, match=r"deadpool\.yaml") as caught:
        resolve({}, {}, content, "deadpool.yaml")
    assert words in str(caught.value)


def test_a_list_in_a_file_is_a_list():
    values = resolve({}, {}, {"preload": ["numpy", "my.models"]}, "deadpool.yaml")
    assert values.words("preload") == ("numpy", "my.models")
