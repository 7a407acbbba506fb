"""Our flags are told from SGLang's, on the command line and in --config files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glm_runtime import config_file, quiet
from glm_runtime.cli import Options, add_arguments, once, split
from glm_runtime.config import ENV, ConfigError, RuntimeConfig, asked
from glm_runtime.launch_server import Given, main


def test_ours_and_the_rest() -> None:
    options, rest, _ = split(
        ["--tp-size", "2", "--policy", "sglang", "--indexer=ragged", "--port", "1", "--cpu-threads", "3"]
    )
    assert (options.policy, options.indexer, options.cpu_threads) == ("sglang", "ragged", 3)
    assert rest == ["--tp-size", "2", "--port", "1"]
    assert options.overrides() == {
        "scheduler": None,
        "indexer": "ragged",
        "prefill_kv": None,
        "context_parallel": None,
    }


def test_sglangs_flags_are_not_taken_for_abbreviations_of_ours() -> None:
    given = ["--schedule-policy", "lpm", "--sched", "x", "--pol", "y", "--index", "z"]
    options, rest, _ = split(given)
    assert rest == given
    assert options == Options()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--indexer-scratch-mb", "0"], "--indexer-scratch-mb"),
        (["--cpu-threads", "two"], "--cpu-threads"),
        (["--policy"], "--policy"),
    ],
)
def test_a_bad_value_names_its_flag(argv: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        split(argv)


def test_twice() -> None:
    once(["--policy", "a", "--policy=a", "--port", "1", "--port", "2"])
    with pytest.raises(ConfigError, match="--policy is given twice: a and b"):
        once(["--policy", "a", "--policy=b"])


def test_values_needed_before_sglang_reads_them() -> None:
    given = Given(["--tp", "2", "--device=cpu", "--port", "7"], {"port": 9, "model-path": "here", "dp-size": 3})
    assert given.value("--device") == "cpu"
    assert given.value("--port") == "7"
    assert given.value("--model-path", "--model") == "here"
    assert given.ranks() == 6
    assert Given([]).ranks() == 1


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("policy: sglang\ncpu_threads: 2\nno-cpu-weight-packing: true\ntp-size: 2\nenable_metrics: true\n")
    path, rest = config_file.path_in(["--port", "1", "--config", str(file)])
    assert (path, rest) == (str(file), ["--port", "1"])
    content = config_file.read(str(file))
    flags = config_file.our_flags(str(file), content)
    options, left, _ = split([*flags, "--cpu-threads", "5"])
    assert (options.policy, options.cpu_threads, options.cpu_weight_packing) == ("sglang", 5, False)
    assert left == []
    assert content == {"tp-size": 2, "enable-metrics": True}
    written = config_file.write_rest(content)
    assert config_file.read(written) == content
    os.unlink(written)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[1, 2]", "flags and their values"),
        ("policy: [a]", "policy takes one value"),
        ("no_cpu_weight_packing: 3", "true or false"),
        ("a: b: c", "does not read"),
        ("cpu-threads: 1\ncpu_threads: 2\n", "given twice"),
    ],
)
def test_a_bad_config_file(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=word) as raised:
        config_file.our_flags(str(file), config_file.read(str(file)))
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--port"], ["--config", "a.yaml", "--config=b.yaml"]])
def test_a_config_flag_without_one_file(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--config"):
        config_file.path_in(argv)


def test_every_flag_of_ours_has_a_line_of_help() -> None:
    import argparse

    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        assert action.help, action.option_strings


def test_help_into_a_reader_that_has_seen_enough() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "glm_runtime.launch_server", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_negative_port_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--port", "-1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "glm_runtime: error: --port -1 is no port (1 to 65535)\n"


def test_list_policies(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list-policies"])
    text = capsys.readouterr().out
    assert "policies:\n  sglang " in text
    assert "--scheduler:" in text


def test_publish_keeps_the_users_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    request = RuntimeConfig(policy="sglang", slots={"scheduler": "sglang"}, device="cpu", threads=2)
    for given, wanted in ((None, None), ("theirs", "theirs,glm_runtime"), ("glm_runtime , x", "glm_runtime , x")):
        if given is None:
            monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("SGLANG_PLUGINS", given)
        request.publish()
        assert os.environ.get("SGLANG_PLUGINS") == wanted
    assert asked() == request
    RuntimeConfig.retract()
    assert asked() is None


def test_quiet_keeps_what_the_operator_gave() -> None:
    text = quiet.warnings_variable("error::UserWarning")
    assert text.split(",")[-1] == "error::UserWarning"
    assert quiet.warnings_variable(text) == text
