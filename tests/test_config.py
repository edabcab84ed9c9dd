"""Settings: where they come from, which one wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.config import OTHER_VARIABLES, Config, PolicyConfig, load
from paramstore.core.schema import Schema
from paramstore.engine.capacity.budget import least_bytes
from paramstore.errors import ConfigError


def load_from(tmp_path: Path, toml: str, environ: dict[str, str] | None = None, **flags: object) -> Config:
    file = tmp_path / "paramstore.toml"
    file.write_text(toml)
    return load(flags, environ=environ or {}, file=file)


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
    config = load(environ={"PARAMSTORE_VOLUMES": text, "PARAMSTORE_ADD_VOLUMES": text})
    assert config.volumes == config.add_volumes == tuple(map(Path, paths))


def test_booleans_and_paths_are_read_from_text() -> None:
    config = load(environ={"PARAMSTORE_PREFILL": "false", "PARAMSTORE_DIR": "/srv/store", "PARAMSTORE_WAIT_TIMEOUT_S": "2.5"})
    assert (config.prefill, config.dir, config.wait_timeout_s) == (False, Path("/srv/store"), 2.5)


def test_sizes_have_a_short_and_a_full_name(tmp_path: Path) -> None:
    assert load_from(tmp_path, 'volume_size_bytes = "1GiB"').volume_size_bytes == 1 << 30
    assert load_from(tmp_path, "volume_size = 4096").volume_size_bytes == 4096


def test_the_policy_s_name_alone_stands_for_its_table(tmp_path: Path) -> None:
    assert load(environ={"PARAMSTORE_POLICY": "lru"}).policy == PolicyConfig(name="lru")
    assert load_from(tmp_path, "policy = 'lru'").policy == load({"policy": "lru"}, environ={}).policy == PolicyConfig(name="lru")


# --- derived


def test_socket_and_volume_lie_in_the_directory_unless_given() -> None:
    config = load({"dir": "/srv"}, environ={})
    assert config.socket_path == Path("/srv/run/paramstore.sock")
    assert config.volume_paths == (Path("/srv/volume"),)
    given_paths = load({"socket": "/run/x.sock", "volumes": ["/a", "/b"]}, environ={})
    assert given_paths.socket_path == Path("/run/x.sock")
    assert given_paths.volume_paths == (Path("/a"), Path("/b"))


def test_volumes_to_add_come_behind_the_others_and_one_that_is_named_twice_is_one() -> None:
    config = load({"dir": "/srv", "add_volumes": ["/srv/x/../volume", "pmem:/b"]}, environ={})
    assert config.volume_paths == (Path("/srv/volume"), Path("pmem:/b"))
    assert [config.adds(Path(path)) for path in ("/srv/volume", "/b", "/c")] == [True, True, False]


# --- refusals


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"speed": 1}, "^flag: there is no setting 'speed'"),
        ({"host_budget": "lots"}, "^flag --host-budget: host_budget_bytes: size 'lots'"),
        ({"host_budget": 1.5}, "^flag --host-budget: host_budget_bytes: size 1.5"),
        ({"host_budget": 0}, "^flag --host-budget: host_budget_bytes=0: must be a size of at least 2 MiB, as in 64GiB$"),
        ({"host_budget": 64}, r"host_budget_bytes=64: must be a size of at least 2 MiB, as in 64GiB; did you mean '64GiB'\?"),
        ({"host_budget": "1KiB"}, "host_budget_bytes='1KiB': must be a size of at least 2 MiB, as in 64GiB$"),
        ({"gradient_budget": "64"}, r"gradient_budget_bytes: size '64' has no unit: did you mean 64GiB\?"),
        ({"hostbudget": 1}, r"^flag: there is no setting 'hostbudget'; did you mean 'host_budget'\?$"),
        ({"host_budget": True}, "host_budget_bytes"),
        ({"volume_size": -1}, "volume_size_bytes=-1"),
        ({"gradient_budget": 0}, "gradient_budget_bytes=0"),
        ({"dir": 5}, "^flag --dir: dir=5: must be a path"),
        ({"dir": ""}, "^flag --dir: dir='': must be a path, and not empty"),
        ({"socket": ""}, "^flag --socket: socket='': must be a path, and not empty"),
        ({"volumes": "abc"}, "^flag --volume: volumes='abc': must be a list of paths"),
        ({"volumes": [1]}, r"^flag --volume: volumes=\[1\]: must be a list of paths"),
        ({"volumes": ["/a", ""]}, "none of them empty"),
        ({"volumes": ["pmem:"]}, "none of them empty"),
        ({"volumes": ["/a", "/b/../a"]}, "^flag --volume: volumes: /a and /b/../a are one directory"),
        ({"volumes": ["/a", "pmem:/a"]}, "/a and pmem:/a are one directory"),
        ({"io_workers": 0}, "^flag: io_workers=0: must be an integer from 1 to 64$"),
        ({"io_workers": 65}, "io_workers=65"),
        ({"io_workers": "x"}, "^flag: io_workers='x': must be an integer from 1 to 64$"),
        ({"update_workers": -1}, "^flag: update_workers=-1: must be an integer from 0 to 256$"),
        ({"piece_bytes": 4096}, "piece_bytes=4096"),
        ({"piece_bytes": (1 << 20) + 1}, "piece_bytes=1048577"),
        ({"wait_timeout_s": 0}, "wait_timeout_s=0"),
        ({"wait_timeout_s": "nan"}, "wait_timeout_s='nan': must be a number above 0"),
        ({"wait_timeout_s": "inf"}, "wait_timeout_s='inf'"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s=-1"),
        ({"pmem_granularity": "bit"}, "pmem_granularity='bit'"),
        ({"policy": 3}, "^flag: policy=3: must be a table"),
        ({"policy": {"name": "belady"}}, "^flag --policy: policy.name='belady': must be schedule, decayed_lfu or lru"),
        ({"policy": {"beta": 1.5}}, "policy.beta=1.5: must be a number from 0 to 1"),
        ({"policy": {"beta": "nan"}}, "policy.beta='nan': must be a number from 0 to 1"),
        ({"policy": {"threshold": "nan"}}, "policy.threshold='nan': must be a number, and not negative"),
        ({"policy": {"decay_steps": 0}}, "policy.decay_steps=0: must be an integer, at least 1"),
        ({"policy": {"gamma": 1}}, "there is no setting 'policy.gamma'"),
        ({"policy__gamma": 1}, "there is no setting 'policy__gamma'"),
        ({"retained_steps": 1}, "retained_steps=1: must be an integer from 2 to 16"),
        ({"held_steps": 17}, "held_steps=17: must be an integer from 0 to 16"),
        ({"prefill": "perhaps"}, "prefill='perhaps': must be true or false"),
        ({"scrub_days": -1}, "scrub_days=-1: must be a number of days up to 3650; 0 for never"),
        ({"scrub_days": "inf"}, "scrub_days='inf': must be a number of days up to 3650; 0 for never"),
        ({"scrub_days": "nan"}, "scrub_days='nan': must be a number of days up to 3650; 0 for never"),
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
    (tmp_path / "latin.toml").write_bytes(b'dir = "\xe9"')
    with pytest.raises(ConfigError, match=r"settings file .*latin\.toml: 'utf-8' codec"):
        load(environ={}, file=tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match=r"settings file .*missing"):
        load(environ={}, file=tmp_path / "missing.toml")


def test_the_environment_is_named_where_it_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"^variable PARAMSTORE_HOST_BUDGET: host_budget_bytes: size 'x'"):
        load(environ={"PARAMSTORE_HOST_BUDGET": "x"})
    with pytest.raises(ConfigError, match=r"^variable PARAMSTORE_IO_WORKERS: io_workers='many': must be an integer from 1 to 64$"):
        load(environ={"PARAMSTORE_IO_WORKERS": "many"})
    with pytest.raises(ConfigError, match=r"^variable PARAMSTORE_DIR: dir='': must be a path, and not empty$"):
        load(environ={"PARAMSTORE_DIR": ""})
    with pytest.raises(ConfigError, match=r"^variable PARAMSTORE_POLICY__BETA: policy.beta='2'"):
        load(environ={"PARAMSTORE_POLICY__BETA": "2"})


def test_a_wrong_value_in_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^settings file .*paramstore\.toml: io_workers=0: must be an integer from 1 to 64$"):
        load_from(tmp_path, "io_workers = 0")
    with pytest.raises(ConfigError, match=r"^settings file .*paramstore\.toml: policy.beta='x': must be a number"):
        load_from(tmp_path, "[policy]\nbeta = 'x'")


@pytest.mark.parametrize("variable", ["PARAMSTORE_HOST_BUGDET", "PARAMSTORE_POLICY__GAMMA", "PARAMSTORE_"])
def test_a_variable_of_ours_that_is_no_setting_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"^variable {variable}: there is no setting"):
        load(environ={variable: "1GiB"})


@pytest.mark.parametrize("variable", sorted(OTHER_VARIABLES))
def test_variables_that_mean_something_else_are_no_settings(variable: str) -> None:
    assert load(environ={variable: "1"}) == Config()


def test_whoever_gives_settings_without_flags_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^ServeOptions: host_budget_bytes: size 'x'"):
        load({"host_budget": "x"}, environ={}, origin="ServeOptions")


def test_every_setting_has_its_rule_and_its_default_keeps_it() -> None:
    policy = PolicyConfig()
    defaults: dict[str, object] = {name: getattr(Config(), name) for name in Config.__struct_fields__ if name != "policy"}
    assert load(defaults, environ={}) == Config()
    assert load({"policy": {name: getattr(policy, name) for name in PolicyConfig.__struct_fields__}}, environ={}) == Config()


def test_the_least_budget_is_what_the_smallest_namespace_takes() -> None:
    schema = Schema.param({"w": ((1,), "bfloat16")})
    least = least_bytes(schema, key_count=1, staging_bytes=0)
    for name in ("host_budget", "gradient_budget"):
        assert getattr(load({name: least}, environ={}), f"{name}_bytes") == least
        with pytest.raises(ConfigError, match=f"{name}_bytes={least - 1}: must be a size of at least 2 MiB"):
            load({name: least - 1}, environ={})
