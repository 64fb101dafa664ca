"""Files that a loop reads back are found; those from before it are not."""

import io
import os

import pytest
import torch

from deadpool_run.worker.verify.files_read import FilesRead


@pytest.fixture
def files(monkeypatch):
    monkeypatch.setattr(torch, "load", torch.load)  # put back later
    files = FilesRead()
    files.begin()
    return files


def save(path):
    torch.save({"weight": torch.ones(2)}, path)
    return path


def from_path(path):
    return torch.load(path)


def from_text(path):
    return torch.load(str(path), weights_only=True)


def from_file(path):
    with path.open("rb") as file:
        return torch.load(file)


@pytest.mark.parametrize("load", [from_path, from_text, from_file])
def test_what_a_step_loads_back_is_found_once(load, files, tmp_path):
    path = save(tmp_path / "best.pt")
    assert files.take() == [], "it was only written"
    assert load(path)["weight"].tolist() == [1, 1]
    load(path)
    assert files.take() == [str(path)]
    load(path)
    assert files.take() == []


def test_a_file_from_before_the_loop_is_no_state(files, tmp_path):
    path = save(tmp_path / "start.pt")
    os.utime(path, (1, 1))
    torch.load(path)
    save(buffer := io.BytesIO())
    buffer.seek(0)
    torch.load(buffer)
    assert files.take() == []
