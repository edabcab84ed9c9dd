"""Settings: where they come from, which one wins, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.config import Config, PolicyConfig, format_size, load, parse_size
from paramstore.errors import ConfigError


def load_from(tmp_path: Path, toml: str, environ: dict[str, str] | None = None, **flags: object) -> Config:
    file = tmp_path / "paramstore.toml"
    file.write_text(toml)
    return load(flags, environ=environ or {}, file=file)


# --- sizes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30), ("1.5MB", 1_500_000), ("4096", 4096), ("0.5 KiB", 512), (" 2TiB ", 2 << 40), ("7B", 7), (12, 12),
        ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes_are_read_exactly(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 gib", "1e9", "64GiB free", "1.GiB", "inf", 1.5, None, ["1"]])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@given(st.text() | st.from_regex(r"\d{1,500}(\.\d+)?(GiB|MB)?", fullmatch=True))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 30, "64 GiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_shown_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


# --- precedence


def test_without_anything_the_defaults_hold() -> None:
    assert load(environ={}) == Config()


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    toml = 'host_budget = "1GiB"\nio_workers = 2\nupdate_workers = 3\n'
    environ = {"PARAMSTORE_HOST_BUDGET": "2GiB", "PARAMSTORE_IO_WORKERS": "5"}
    config = load_from(tmp_path, toml, environ, host_budget="3GiB")
    assert (config.host_budget_bytes, config.io_workers, config.update_workers) == (3 << 30, 5, 3)
    assert config.piece_bytes == Config().piece_bytes


def test_a_table_is_overlaid_setting_by_setting(tmp_path: Path) -> None:
    config = load_from(tmp_path, "[policy]\nbeta = 0.25\nname = 'lru'\n", {"PARAMSTORE_POLICY__NAME": "decayed_lfu"})
    assert config.policy == PolicyConfig(name="decayed_lfu", beta=0.25)


def test_variables_of_others_are_left_alone() -> None:
    assert load(environ={"PARAMSTORE_ADDRESS": "unix:///x", "PARAMSTORE": "1", "HOME": "/"}) == Config()


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("/a", ("/a",)), ("/a:/b", ("/a", "/b")), ("pmem:/a", ("pmem:/a",)), ("/a:pmem:/b:/c", ("/a", "pmem:/b", "/c")),
        ("/my-pmem:/b", ("/my-pmem", "/b")), ("", ()),
    ],
)  # fmt: skip
def test_volumes_in_the_environment_are_separated_as_in_path(text: str, paths: tuple[str, ...]) -> None:
    assert load(environ={"PARAMSTORE_VOLUMES": text}).volumes == tuple(map(Path, paths))


def test_booleans_and_paths_are_read_from_text() -> None:
    config = load(environ={"PARAMSTORE_PREFILL": "false", "PARAMSTORE_DIR": "/srv/store", "PARAMSTORE_WAIT_TIMEOUT_S": "2.5"})
    assert (config.prefill, config.dir, config.wait_timeout_s) == (False, Path("/srv/store"), 2.5)


def test_sizes_have_a_short_and_a_full_name(tmp_path: Path) -> None:
    assert load_from(tmp_path, 'volume_size_bytes = "1GiB"').volume_size_bytes == 1 << 30
    assert load_from(tmp_path, "volume_size = 4096").volume_size_bytes == 4096


# --- derived


def test_socket_and_volume_lie_in_the_directory_unless_given() -> None:
    config = load({"dir": "/srv"}, environ={})
    assert config.socket_path == Path("/srv/run/paramstore.sock")
    assert config.volume_paths == (Path("/srv/volume"),)
    given_paths = load({"socket": "/run/x.sock", "volumes": ["/a", "/b"]}, environ={})
    assert given_paths.socket_path == Path("/run/x.sock")
    assert given_paths.volume_paths == (Path("/a"), Path("/b"))


# --- refusals


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"speed": 1}, "flags: there is no setting 'speed'"),
        ({"host_budget": "lots"}, "flags: host_budget: size 'lots'"),
        ({"host_budget": 1.5}, "flags: host_budget: size 1.5"),
        ({"host_budget": 0}, "host_budget_bytes=0"),
        ({"host_budget": True}, "host_budget_bytes"),
        ({"volume_size": -1}, "volume_size_bytes=-1"),
        ({"gradient_budget": 0}, "gradient_budget_bytes=0"),
        ({"dir": 5}, "5 is not a path"),
        ({"volumes": "abc"}, r"\$\.volumes"),
        ({"volumes": [1]}, "1 is not a path"),
        ({"io_workers": 0}, "io_workers=0"),
        ({"io_workers": 65}, "io_workers=65"),
        ({"io_workers": "x"}, r"\$\.io_workers"),
        ({"update_workers": -1}, "update_workers=-1"),
        ({"piece_bytes": 4096}, "piece_bytes=4096"),
        ({"piece_bytes": (1 << 20) + 1}, "piece_bytes=1048577"),
        ({"wait_timeout_s": 0}, "wait_timeout_s=0"),
        ({"wait_timeout_s": "nan"}, "wait_timeout_s=nan"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s=-1"),
        ({"pmem_granularity": "bit"}, "pmem_granularity='bit'"),
        ({"policy": 3}, r"\$\.policy"),
        ({"policy": {"name": "belady"}}, "policy.name='belady'"),
        ({"policy": {"beta": 1.5}}, "beta must be in"),
        ({"policy": {"beta": "nan"}}, "beta must be in"),
        ({"policy": {"threshold": "nan"}}, "threshold not negative"),
        ({"policy": {"decay_steps": 0}}, "decay_steps at least 1"),
        ({"policy": {"gamma": 1}}, "gamma"),
    ],
)
def test_a_wrong_setting_is_named(flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(flags, environ={})


def test_the_file_is_named_where_it_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"paramstore\.toml: there is no setting 'speed'"):
        load_from(tmp_path, "speed = 1")
    with pytest.raises(ConfigError, match=r"settings file .*paramstore\.toml"):
        load_from(tmp_path, "= nonsense")
    with pytest.raises(ConfigError, match=r"settings file .*missing"):
        load(environ={}, file=tmp_path / "missing.toml")


def test_the_environment_is_named_where_it_is_wrong() -> None:
    with pytest.raises(ConfigError, match="environment: host_budget: size 'x'"):
        load(environ={"PARAMSTORE_HOST_BUDGET": "x"})
