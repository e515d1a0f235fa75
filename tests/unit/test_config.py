"""Settings come from five places in one order, and what is wrong is named with file, line and key."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kimi_ray.config import RuntimeConfig, differing, load_config, load_models, resolve_home, settings_table
from kimi_ray.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    return made


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refused(error: pytest.ExceptionInfo[ConfigError], *words: str) -> ConfigError:
    assert error.value.code == "config.invalid"
    for word in words:
        assert word in str(error.value), (word, str(error.value))
    return error.value


def test_defaults_of_the_design(home: Path) -> None:
    config = load_config(home, environ={})
    assert (config.backend, config.compression, config.shards) == ("jsonl", "none", 1)
    assert (config.durability, config.checkpoint) == ("disk", "request")
    assert (config.write_window_ms, config.sync_interval_ms) == (200, 1000)
    assert (config.lease_timeout_s, config.store_timeout_s, config.claim_timeout_s) == (60, 30, 15)
    mib = 1 << 20
    assert config.max_event_bytes == 16 * mib
    assert (config.log_bytes, config.host_bytes, config.batch_bytes) == (64 * mib, 256 * mib, 4 * mib)
    assert (config.call_bytes, config.store_queue_bytes) == (32 * mib, 256 * mib)
    assert config.agents_per_host == 256


def test_each_place_wins_over_those_before(home: Path, tmp_path: Path) -> None:
    write(home / "config.toml", "shards = 2\nwrite_window_ms = 20\nsync_interval_ms = 200\nstore_timeout_s = 2\n")
    own = write(tmp_path / "mine.toml", "write_window_ms = 30\nsync_interval_ms = 300\nstore_timeout_s = 3\n")
    env = {"KIMI_RAY_CONFIG": str(own), "KIMI_RAY_SYNC_INTERVAL_MS": "400", "KIMI_RAY_STORE_TIMEOUT_S": "4"}
    config = load_config(home, environ=env, store_timeout_s=5.5)
    assert config.shards == 2
    assert config.write_window_ms == 30
    assert config.sync_interval_ms == 400
    assert config.store_timeout_s == 5.5


def test_an_argument_that_is_none_says_nothing(home: Path) -> None:
    assert load_config(home, environ={"KIMI_RAY_SHARDS": "3"}, shards=None).shards == 3


def test_a_mapping_is_like_arguments_and_a_path_like_the_variable(home: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "shards = 4")
    env = {"KIMI_RAY_SHARDS": "3"}
    assert load_config(home, {"shards": 2}, environ=env).shards == 2
    assert load_config(home, file, environ={}).shards == 4
    assert load_config(home, file, environ=env).shards == 3


def test_a_ready_config_is_taken_as_it_is(home: Path) -> None:
    ready = load_config(home, environ={}, shards=2)
    again = load_config(config=ready, environ={"KIMI_RAY_SHARDS": "9"}, namespace="other")
    assert (again.shards, again.namespace, again.home) == (2, "other", str(home))


def test_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_home(None, {}) == str(tmp_path / ".kimi-ray")
    assert resolve_home(None, {"KIMI_RAY_HOME": "~/x"}) == str(tmp_path / "x")
    assert resolve_home("y/../z", {"KIMI_RAY_HOME": "/x"}) == str(Path.cwd() / "z")
    assert resolve_home(None, {"KIMI_RAY_HOME": ""}) == str(tmp_path / ".kimi-ray")
    own = write(tmp_path / "c.toml", f'home = "{tmp_path}/w"')
    assert load_config(environ={"KIMI_RAY_CONFIG": str(own)}).home == str(tmp_path / "w")
    env = {"KIMI_RAY_CONFIG": str(own), "KIMI_RAY_HOME": str(tmp_path / "v")}
    assert load_config(environ=env).home == str(tmp_path / "v")
    assert load_config(tmp_path / "u", environ=env).home == str(tmp_path / "u")


@pytest.mark.parametrize("bad", ["", "a\0b"])
def test_a_home_that_is_no_path(bad: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(bad, environ={})
    refused(error, "home")


def test_a_home_below_a_regular_file_is_left_to_the_store(tmp_path: Path) -> None:
    write(tmp_path / "file", "x")
    assert load_config(tmp_path / "file" / "home", environ={}).home == str(tmp_path / "file" / "home")


def test_a_home_file_that_names_another_home(home: Path) -> None:
    write(home / "config.toml", 'shards = 1\n\nhome = "/elsewhere"\n')
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    assert refused(error, "another home").details["line"] == 3


def test_an_unknown_key_names_file_line_key_and_the_near_one(home: Path) -> None:
    file = write(home / "config.toml", '# mine\nshards = 1\n\nbackand = "sqlite"\n')
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    found = refused(error, str(file), "line 4", "backand", "'backend'")
    assert found.details == {"key": "backand", "file": str(file), "line": 4, "problem": "there is no such setting"}


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ('shards = "two"', "shards", 1),
        ("\nshards = 0", "shards", 2),
        ('shards = "2"', "shards", 1),
        ("shards = true", "shards", 1),
        ('backend = "postgres"', "backend", 1),
        ("durability = 3", "durability", 1),
        ("store_timeout_s = inf", "store_timeout_s", 1),
        ("store_timeout_s = nan", "store_timeout_s", 1),
        ("[models]\nx = 3", "models.x", 2),
        ("shards = 1\n[host_resources]\nGPU = 'many'", "host_resources.GPU", 3),
        ("[models.kimi]\nprovider = 'openai'\ntimeout_s = 'long'\n", "models.kimi.timeout_s", 3),
        ("[models.kimi]\nprovider = 'openai'\n\ntimeuot_s = 3\n", "models.kimi.timeuot_s", 4),
        ("[models.'a.b']\nprovider = 'telepathy'\n", "models.a.b.provider", 2),
    ],
)
def test_a_bad_value_names_its_line(home: Path, text: str, key: str, line: int) -> None:
    write(home / "config.toml", text)
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    found = refused(error, "config.toml", key)
    assert (found.details["key"], found.details.get("line")) == (key, None if key == "models.a.b.provider" else line)


HOOKS = """[[hooks]]
event = "Stop"
command = "true"

[[hooks]]  # [[hooks]] again
event = "Stop"
command = "true"
"""


@pytest.mark.parametrize(
    ("text", "line", "key", "words", "hint"),
    [
        (HOOKS + "timeout_s = 'long'\n", 8, "hooks.1.timeout_s", ("valid number",), "docs/configuration.md"),
        (HOOKS + "comand = 'x'\n", 8, "hooks.1.comand", ("there is no such key",), "did you mean 'command'?"),
        (HOOKS + "zzz = 1\n", 8, "hooks.1.zzz", ("there is no such key",), "the keys of hooks.1 are: event, command"),
        (HOOKS + "[hooks.env]\nA = 1\n", 9, "hooks.1.env.A", ("valid string",), "docs/configuration.md"),
        (HOOKS + "[[hooks]]\nevent = 'Stop'\n", 8, "hooks.2.command", ("is missing",), "the keys of hooks.2 are"),
        ("[[permissions]]\ntool = 'Bash'\ndecision = 'deny'\n[[permissions]]\ntool = 'Read'\ndecision = 'no'\n",
         6, "permissions.1.decision", ("'allow', 'ask' or 'deny'",), "docs/configuration.md"),
        ("[[permissions]]\ntool = 'Bash'\ndecision = 'deny'\nqq = 1\n",
         4, "permissions.0.qq", ("there is no such key",), "the keys of permissions.0 are: tool, decision"),
        ("[mcp_servers.url]\ncommand = ['x']\nqq = 1\n", 3, "mcp_servers.url.qq", ("no such key",),
         "the keys of mcp_servers.url are: command, url, env"),
        ("[mcp_servers.a]\nenv = {}\n", 1, "mcp_servers.a", (": an MCP server needs a command",),
         "docs/configuration.md"),
        ("[models.x]\nprovider = 'scripted'\non_end = 'stop'\n", 3, "models.x.on_end", ("'cycle'",),
         "docs/configuration.md"),
        ("[models.x]\nprovider = 'chaos'\n[models.x.chaos]\nqq = 1\n", 4, "models.x.chaos.qq", ("no such key",),
         "the keys of models.x.chaos are: seed, rate_limit"),
        ("[models.x]\nprovider = 'chaos'\n[models.x.chaos]\nrate_limt = 1\n", 4, "models.x.chaos.rate_limt",
         ("no such key",), "did you mean 'rate_limit'?"),
        ("[models.x]\nqq = 1\n", 2, "models.x.qq", ("no such key",), "the keys of models.x are: provider, model"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_table_is_told_by_its_own_line_and_keys(
    home: Path, text: str, line: int, key: str, words: tuple[str, ...], hint: str
) -> None:
    write(home / "config.toml", text)
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    found = refused(error, f"line {line}: {key}: ", *words)
    assert (found.details["line"], found.details["key"]) == (line, key)
    assert hint in (found.hint or "")
    assert "value error" not in str(found) and "nputs are" not in str(found)


def test_broken_toml_names_its_line(home: Path) -> None:
    write(home / "config.toml", "shards = 1\nwrite_window_ms = = 2\n")
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    assert refused(error, "line 2").details["line"] == 2
    write(home / "config.toml", "shards = 1\n[models.x")
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    refused(error, "line 2")


def test_a_file_that_is_not_utf8(home: Path) -> None:
    (home / "config.toml").write_bytes(b'namespace = "\xff"')
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={})
    refused(error, "not UTF-8")


def test_a_named_file_must_exist_and_be_readable(home: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={"KIMI_RAY_CONFIG": str(home / "no.toml")})
    assert error.value.code == "config.not_found"
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={"KIMI_RAY_CONFIG": str(home)})
    assert error.value.code == "config.unreadable"


def test_bad_variables_name_themselves(home: Path) -> None:
    for env, words in (
        ({"KIMI_RAY_SHARDS": "two"}, ("KIMI_RAY_SHARDS",)),
        ({"KIMI_RAY_BAKEND": "sqlite"}, ("KIMI_RAY_BAKEND", "KIMI_RAY_BACKEND")),
        ({"KIMI_RAY_HOST_RESOURCES": "GPU=1"}, ("KIMI_RAY_HOST_RESOURCES", "JSON")),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(home, environ=env)
        refused(error, *words)


def test_variables_of_every_kind(home: Path) -> None:
    config = load_config(
        home,
        environ={
            "KIMI_RAY_HOME_SHARED": "true",
            "KIMI_RAY_HOST_RESOURCES": '{"GPU": 0.5}',
            "KIMI_RAY_FEATURES": "a.b:C, d.e:F",
            "KIMI_RAY_MODELS": '{"m": {"provider": "scripted"}}',
            "KIMI_RAY_ADDRESS": "in-process",
            "KIMI_RAY_SHARDS": "",
            "KIMI_RAY_SOMETHING_OF_MINE": "1",
        },
    )
    assert config.home_shared is True
    assert config.host_resources == {"GPU": 0.5}
    assert config.features == ("a.b:C", "d.e:F")
    assert config.address == "in-process"
    assert load_models(config)["m"].provider == "scripted"


def test_unknown_and_bad_arguments(home: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(home, environ={}, shard=2)
    refused(error, "shard", "'shards'")
    with pytest.raises(ConfigError) as error:
        load_config(home, {"shards": -1}, environ={})
    refused(error, "shards")


def test_models_of_two_files_are_joined(home: Path, tmp_path: Path) -> None:
    write(home / "config.toml", "[models.a]\nprovider='scripted'\n[models.b]\nprovider='scripted'\n")
    own = write(tmp_path / "c.toml", "[models.b]\nprovider='openai'\n[models.c]\nprovider='openai'\n")
    models = load_models(load_config(home, own, environ={}))
    assert {name: model.provider for name, model in models.items()} == {"a": "scripted", "b": "openai", "c": "openai"}


def test_a_list_in_a_file_may_be_a_tuple_here(home: Path) -> None:
    write(home / "config.toml", 'features = ["a:B"]')
    assert load_config(home, environ={}).features == ("a:B",)


def test_the_fingerprint_holds_what_drivers_must_share_and_nothing_else(home: Path) -> None:
    base = load_config(home, environ={})
    same = load_config(home, environ={}, namespace="x", default_model="m", models={"m": {"provider": "scripted"}})
    assert differing(base.runtime_fingerprint(), same.runtime_fingerprint()) == {}
    other = load_config(home, environ={}, shards=2, durability="os")
    assert differing(base.runtime_fingerprint(), other.runtime_fingerprint()) == {
        "shards": {"mine": 1, "theirs": 2},
        "durability": {"mine": "disk", "theirs": "os"},
    }


def test_a_config_is_frozen_and_pickles(home: Path) -> None:
    config = load_config(home, environ={})
    with pytest.raises(Exception, match="frozen"):
        config.shards = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_setting_is_described() -> None:
    table = settings_table()
    for name, field in RuntimeConfig.model_fields.items():
        assert field.description, name
        assert f"| `{name}` |" in table
        if name.endswith(("_s", "_ms", "_bytes")):
            assert field.description.count(" ") > 2
