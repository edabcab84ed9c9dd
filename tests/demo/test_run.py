"""A run stops anywhere and goes on at its last commit, as if nothing had been."""

import pytest
import torch

from paramstore.demo.checkpoint import CheckpointName
from paramstore.demo.run import StoredRun
from paramstore.errors import CorruptRecord, VolumeError


class OneNamespaceStore:
    """Opens the namespace it was given; as the writer, after a rollback."""

    def __init__(self, namespace):
        self.namespace = namespace

    def create_namespace(self, name, schema, *, layers, experts):
        assert schema == self.namespace.schema
        assert (layers, experts) == (len(self.namespace.layers), self.namespace.experts)
        return self.namespace

    def open_namespace(self, name, mode):
        assert mode == "write"
        self.namespace.roll_back()
        return self.namespace


@pytest.fixture
def store(namespace):
    return OneNamespaceStore(namespace)


def test_begin_commits_step_0(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    assert run.namespace.committed_step == 0
    assert (tmp_path / CheckpointName.from_extra(run.namespace.extra(0)).file).exists()


def test_commits_come_every_so_many_steps_and_at_the_end(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    committed = []
    while run.step < settings.steps:
        run.train_step()
        committed.append(run.namespace.committed_step)
    assert committed == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert len(list(tmp_path.iterdir())) == 2, "the two newest checkpoints are kept"


def test_resumed_run_repeats_the_lost_steps_bitwise(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    first = [run.train_step() for _ in range(settings.kill_step)]
    digests = run.place.digests()
    torch.manual_seed(123)  # whatever the process did meanwhile
    again = StoredRun.resume(store, settings, corpus, directory=tmp_path)
    assert again.step == settings.resume_step == 8
    assert [again.train_step() for _ in range(2)] == first[8:]
    assert again.place.digests() == digests


def test_resume_at_step_0_repeats_everything(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    first = [run.train_step() for _ in range(3)]
    again = StoredRun.resume(store, settings, corpus, directory=tmp_path)
    assert [again.train_step() for _ in range(3)] == first


def test_checkpoint_is_synced_before_the_commit_that_names_it(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    seen = []
    commit = run.namespace.commit

    def look_then_commit(step, extra):
        seen.append((tmp_path / CheckpointName.from_extra(extra).file).exists())
        return commit(step, extra)

    run.namespace.commit = look_then_commit
    for _ in range(4):
        run.train_step()
    assert seen == [True]


def test_failed_commit_keeps_the_checkpoint_of_the_committed_step(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    for _ in range(8):
        run.train_step()

    def fail(step, extra):
        raise VolumeError("the volume is gone")

    run.namespace.commit = fail
    for _ in range(3):
        run.train_step()
    with pytest.raises(VolumeError, match="gone"):
        run.train_step()
    del run.namespace.commit
    assert StoredRun.resume(store, settings, corpus, directory=tmp_path).step == 8


def test_checkpoint_of_another_step_is_refused(store, settings, corpus, tmp_path):
    run = StoredRun.begin(store, settings, corpus, directory=tmp_path)
    for _ in range(4):
        run.train_step()
    run.namespace.extras[4] = run.namespace.extras[0]
    with pytest.raises(CorruptRecord, match="the store is at step 4, its dense checkpoint at step 0"):
        StoredRun.resume(store, settings, corpus, directory=tmp_path)
