"""`worldserve COMMAND`: listing, dispatch, and what a mistake or Ctrl-C looks like."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from worldserve import cli
from worldserve.version import __version__

COMMANDS = {
    "echo": "sample_commands.echo:main",
    "interrupted": "sample_commands.interrupted:main",
    "needs-a-package": "sample_commands.needs_a_package:main",
    "absent": "sample_commands.absent:main",
}
SOURCES = {
    "__init__": "raise AssertionError('listing imported the package')",
    "echo": '''"""Prints its arguments.

More text, not in the list.
"""
def main(argv=None):
    import os, sys
    print(sys.argv[0], list(argv), os.environ["OMP_WAIT_POLICY"])
    return 7
''',
    "interrupted": '''"""Ignored, because of:"""
SUMMARY = "Is interrupted at once."
def main(argv=None):
    raise KeyboardInterrupt
''',
    "needs_a_package": '"""Needs what is not there."""\nimport a_package_nobody_has\ndef main(argv=None): pass\n',
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of commands, installed as the only one."""
    directory = tmp_path / "sample_commands"
    directory.mkdir()
    for name, source in SOURCES.items():
        (directory / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(sys, "argv", ["worldserve"])
    for module in [name for name in sys.modules if name.partition(".")[0] == "sample_commands"]:
        monkeypatch.delitem(sys.modules, module)
    points = {name: EntryPoint(name, value, cli.COMMAND_GROUP) for name, value in COMMANDS.items()}
    monkeypatch.setattr(cli, "installed_commands", lambda: points)
    return directory


@pytest.fixture
def importable(package: Path) -> Path:
    """The same package, now free to be imported."""
    (package / "__init__.py").write_text("")
    return package


@pytest.mark.usefixtures("package")
def test_help_lists_every_command_with_one_line_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  echo             Prints its arguments." in lines
    assert "  interrupted      Is interrupted at once." in lines
    assert "  absent           (not in this installation: no module sample_commands.absent)" in lines


@pytest.mark.usefixtures("package")
def test_no_arguments_is_a_usage_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: worldserve COMMAND" in capsys.readouterr().err


@pytest.mark.usefixtures("importable")
def test_a_command_gets_its_arguments_its_program_name_and_passive_threads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "--seed", "3"]) == 7
    assert capsys.readouterr().out == "worldserve echo ['--seed', '3'] PASSIVE\n"


@pytest.mark.usefixtures("importable")
def test_help_with_a_command_is_the_command_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "echo"]) == 7
    assert "['--help']" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ecko"], "there is no command 'ecko'. Did you mean `worldserve echo`?"),
        (["--seed"], "there is no option '--seed'."),
        (["xyz"], "there is no command 'xyz'. `worldserve --help` lists the commands."),
    ],
)
@pytest.mark.usefixtures("package")
def test_an_unknown_command_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("importable")
def test_an_interrupt_ends_with_130_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["interrupted"]) == 130
    assert capsys.readouterr().err == "worldserve: interrupted\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("needs-a-package", "It needs the Python package 'a_package_nobody_has', which is not installed."),
        ("absent", "The installation has no module sample_commands.absent"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_a_command_that_cannot_be_imported_says_what_is_missing(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("importable")
def test_a_missing_package_is_installed_from_the_checkout_and_not_from_an_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli._EXTRAS, "sample_commands", "sim")
    assert cli.main(["needs-a-package"]) == 1
    assert "pip install '.[sim]' in the checkout" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    code = "import sys; from worldserve.cli import main; sys.exit(main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()  # before the program has started: its first write fails
    _, error = process.communicate()
    assert (process.returncode, error) == (1, b"")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"worldserve {__version__}\n"


def test_every_installed_command_has_a_module_and_a_summary() -> None:
    points = cli.installed_commands()
    assert points, "no commands are installed: run `make setup`"
    poor = {
        name: text
        for name, point in points.items()
        if not (text := cli.summary(point)) or text.startswith("(") or len(text) > 100
    }
    assert poor == {}, (
        "each command of pyproject.toml needs its module, with a first docstring line of 1 to 100 characters"
    )


def test_listing_the_commands_imports_no_heavy_package() -> None:
    code = (
        "import sys; from worldserve.cli import main; main(['--help']);"
        "print(sorted({'torch', 'numpy', 'grpc', 'sapien', 'services'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
