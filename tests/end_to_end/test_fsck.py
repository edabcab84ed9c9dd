"""`paramstore fsck` on real directories: of daemons that were stopped or killed, spoilt, and with the catalog gone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.cli.main import main
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent
from paramstore.errors import VolumeError
from paramstore.fsck.check import check, rebuild
from paramstore.storage.catalog.copied import read_catalog
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

pytestmark = pytest.mark.slow

SHAPE = (32, 32)
LAYERS, EXPERTS = 2, 3
KEYS: list[ExpertKey] = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
BUDGETS = ("--host-budget", "48MiB", "--gradient-budget", "4MiB")
Image = dict[str, dict[int, tuple[bytes, dict[ExpertKey, dict[str, torch.Tensor]]]]]
"""Per namespace and step: extra, and every field of every record."""
Fsck = Callable[..., tuple[int, str, str]]


def initial(key: ExpertKey) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * key[0] + key[1])
    return {"w": torch.randn(SHAPE, generator=generator)}


def update(namespace: ps.Namespace, keys: list[ExpertKey]) -> None:
    namespace.push({key: {"w": torch.full(SHAPE, 0.5)} for key in keys})
    namespace.apply(ps.AdamW(lr=0.01)).wait()


def volumes_of(directory: Path) -> list[str]:
    return ["--volume", str(directory / "a"), "--volume", str(directory / "b")]


def served(directory: Path) -> DaemonProcess:
    return ForkedDaemon(directory, *volumes_of(directory), *BUDGETS, environment=QUIET)


def image_of(directory: Path) -> Image:
    """Everything that a daemon on `directory` gives to readers."""
    image: Image = {}
    with served(directory) as daemon, ps.connect(daemon.address) as store:
        for listed in store.namespaces():
            name = str(listed["name"])
            with store.open_namespace(name) as newest:
                steps = {step: newest.extra(step) for step in newest.steps()}
            for step, extra in steps.items():
                with store.open_namespace(name, at=step) as reader:
                    image.setdefault(name, {})[step] = (extra, {key: reader.read(key) for key in KEYS})
    return image


def assert_equal(found: Image, expected: Image) -> None:
    assert {name: list(steps) for name, steps in found.items()} == {name: list(steps) for name, steps in expected.items()}
    for name, steps in expected.items():
        for step, (extra, records) in steps.items():
            assert found[name][step][0] == extra
            for key, fields in records.items():
                assert all(torch.equal(found[name][step][1][key][field], value) for field, value in fields.items())


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on two volumes whose daemon was killed: two namespaces, partial updates, a rollback, a reader on an old step, and
    write-backs that no step has."""
    directory = tmp_path_factory.mktemp("fsck") / "store"
    schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
    with served(directory) as daemon, ps.connect(daemon.address) as store:
        trained = store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS)
        trained.initialize(initial)
        trained.commit(1, b"first").wait()
        plain = store.create_namespace("frozen", ps.param_schema({"w": (SHAPE, "float32")}), layers=LAYERS, experts=EXPERTS)
        plain.initialize(initial)
        plain.commit(5, b"once").wait()
        reader = store.open_namespace("moe")
        update(trained, KEYS[:4])
        trained.commit(2, b"second").wait()
        update(trained, KEYS)
        trained.write_back().wait()
        trained.rollback(2)
        update(trained, KEYS[3:])
        trained.commit(4, b"fourth" * 5000).wait()
        update(trained, KEYS[:2])
        trained.write_back().wait()
        assert reader.committed_step == 1
        daemon.kill()
    return directory


@pytest.fixture(scope="module")
def image(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """What the untouched store has."""
    copy = tmp_path_factory.mktemp("image") / "store"
    shutil.copytree(template, copy, ignore=shutil.ignore_patterns("*.sock"))
    return image_of(copy)


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    """A copy of the template, to be spoilt."""
    shutil.copytree(template, tmp_path / "store", ignore=shutil.ignore_patterns("*.sock"))
    return tmp_path / "store"


@pytest.fixture
def fsck(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fsck:
    """Runs `paramstore fsck` on the copy; gives the exit code and what stood on stdout and stderr."""
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["paramstore", "fsck", "--dir", str(directory), *volumes_of(directory), *words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def hashes(directory: Path) -> dict[str, str]:
    """Of every file, so that nothing written goes unseen."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def newest_record(directory: Path, step: int) -> tuple[ExpertKey, Extent]:
    """A key of `moe` whose newest record `step` brought, and where the catalog says that it lies."""
    rows = read_catalog(directory / "catalog").namespaces["moe"].rows
    return next((key, own[-1].located.extent) for key, own in sorted(rows.items()) if own[-1].first_step == step)


def flip(directory: Path, volume: int, offset: int) -> None:
    path = directory / "ab"[volume] / f"volume-{volume:03d}.data"
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_store_whose_daemon_was_killed_is_clean_and_nothing_is_written(directory: Path, fsck: Fsck) -> None:
    before = hashes(directory)
    code, out, err = fsck()
    assert (code, err) == (0, "")
    assert "clean" in out
    assert "namespace moe: steps proven by the volumes: 1, 2, 4" in out
    assert hashes(directory) == before


def test_json_alone_is_on_stdout(fsck: Fsck) -> None:
    code, out, _ = fsck("--json")
    said = json.loads(out)
    assert (code, said["findings"], said["lost"], said["is_rebuilt"], said["has_catalog"]) == (0, [], [], False, True)
    assert said["namespaces"]["frozen"]["proven_steps"] == [5]


def test_a_lost_catalog_is_rebuilt_and_the_daemon_serves_every_step_bitwise(
    directory: Path, fsck: Fsck, image: Image
) -> None:
    shutil.rmtree(directory / "catalog")
    before = hashes(directory)
    code, out, _ = fsck()
    assert code == 4
    assert "catalog" in out
    assert hashes(directory) == before
    code, out, _ = fsck("--rebuild")
    assert code == 0, out
    assert "rebuilt: a new catalog with 4 steps of 2 namespaces" in out
    assert_equal(image_of(directory), image)
    assert fsck()[0] == 0


def test_a_start_without_the_catalog_does_not_stand_in_the_way_of_the_rebuild(
    directory: Path, fsck: Fsck, image: Image
) -> None:
    shutil.rmtree(directory / "catalog")
    with pytest.raises(AssertionError, match="fsck --dir DIR --rebuild"), served(directory):
        pass
    code, out, _ = fsck("--rebuild")
    assert code == 0, out
    assert_equal(image_of(directory), image)


def test_a_rebuild_of_a_healthy_store_keeps_the_old_catalog(directory: Path, fsck: Fsck, image: Image) -> None:
    old = hashes(directory / "catalog")["data.mdb"]
    code, out, _ = fsck("--rebuild")
    assert code == 0, out
    assert "catalog.before-rebuild-1" in out
    assert hashes(directory / "catalog.before-rebuild-1")["data.mdb"] == old
    assert_equal(image_of(directory), image)


def test_a_flipped_bit_is_named_and_a_rebuild_goes_back_to_the_step_before(
    directory: Path, fsck: Fsck, image: Image
) -> None:
    key, extent = newest_record(directory, 4)
    flip(directory, extent.volume, extent.offset_bytes + 5000)
    before = hashes(directory)
    code, out, _ = fsck("--json")
    assert code == 4
    assert hashes(directory) == before
    said = [(one["volume"], one["offset"], tuple(one["key"]), one["step"]) for one in json.loads(out)["findings"]]
    assert said == [(extent.volume, extent.offset_bytes, key, 4)]
    code, out, _ = fsck("--rebuild")
    assert code == 4
    assert "lost: " in out
    older = {**image, "moe": {step: held for step, held in image["moe"].items() if step != 4}}
    assert_equal(image_of(directory), older)


def test_where_nothing_can_be_rebuilt_nothing_is_written(directory: Path, fsck: Fsck) -> None:
    for index, name in enumerate("ab"):
        path = directory / name / f"volume-{index:03d}.data"
        with path.open("r+b") as file:
            file.seek(11 << 20)
            file.write(bytes(path.stat().st_size - (11 << 20)))
    before = hashes(directory)
    code, out, _ = fsck("--rebuild")
    assert code == 4
    assert "nothing was rebuilt: no step of frozen, moe is proven" in out
    after = hashes(directory)
    assert {name for name in after if after[name] != before.get(name)} <= {"lock"}


def test_a_store_that_is_served_is_refused(directory: Path, fsck: Fsck) -> None:
    with served(directory) as daemon:
        for words in ((), ("--rebuild",)):
            code, out, err = fsck(*words)
            assert (code, out) == (1, "")
            assert f"is in use by process {daemon.pid}" in err


def test_volumes_in_another_order_are_the_same_store(directory: Path) -> None:
    given = volumes_of(directory)[1::2]
    for order in (given, given[::-1]):
        report = check(directory, order)
        assert report.findings == []
        assert [disk.place for _, disk in sorted(report.found.disks.items())] == [
            f"volume {index} ({place}/volume-00{index}.data)" for index, place in enumerate(given)
        ]
        assert rebuild(directory, order).is_rebuilt


def test_volumes_whose_files_were_renamed_are_named(directory: Path, fsck: Fsck) -> None:
    (directory / "a" / "volume-000.data").rename(directory / "spare")
    (directory / "b" / "volume-001.data").rename(directory / "a" / "volume-000.data")
    (directory / "spare").rename(directory / "b" / "volume-001.data")
    code, out, _ = fsck("--rebuild")
    assert code == 4
    assert "volume 0: says that it is volume 1: its file was renamed" in out


def test_volumes_that_are_served_from_another_directory_are_refused(directory: Path, tmp_path: Path) -> None:
    """The store's lock lies in its own directory; nothing of it is in the one that was given."""
    other = tmp_path / "other"
    other.mkdir()
    with served(directory):
        for run in (check, rebuild):
            with pytest.raises(VolumeError, match="in use by another process"):
                run(other, volumes_of(directory)[1::2])
    assert not (other / "catalog").exists()
