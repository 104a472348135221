"""scripts/check_breaking.sh: which state of the contract a change is judged against, and what it finds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).with_name("buf")
PROTO = """\
syntax = "proto3";
package worldserve.v1;
message Item {
  string name = 1;
  int32 count = 2;
}
"""
FIELD_REMOVED = PROTO.replace("  int32 count = 2;\n", "")
FIELD_ADDED = PROTO.replace("}\n", "  int32 size = 3;\n}\n")

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed (extra `dev`)")


class Checkout:
    """A git repository with one proto file and the script under test."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create(cls, root: Path) -> "Checkout":
        """Makes an empty repository on branch main."""
        (root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/check_breaking.sh", root / "scripts")
        shutil.copy(ROOT / "buf.yaml", root)
        checkout = cls(root)
        checkout.git("init", "-q", "-b", "main")
        return checkout

    def git(self, *arguments: str) -> None:
        """Runs git as a fixed author."""
        identity = ["-c", "user.name=test", "-c", "user.email=test", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)

    def write(self, proto: str) -> None:
        """Writes the proto file."""
        path = self.root / "protos/worldserve/v1/item.proto"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(proto)

    def commit(self, message: str = "state") -> None:
        """Commits everything."""
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def check(self, *arguments: str) -> tuple[int, str]:
        """Returns the script's exit code and all that it printed."""
        environment = {"BUF": str(BUF), "PATH": "/usr/bin:/bin", "HOME": str(self.root)}
        command = ["bash", "scripts/check_breaking.sh", *arguments]
        result = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout without a commit."""
    return Checkout.create(tmp_path / "checkout")


@pytest.mark.parametrize(("proto", "breaks"), [(PROTO, False), (FIELD_ADDED, False), (FIELD_REMOVED, True)])
def test_on_main_without_a_tag_the_last_commit_is_the_reference(checkout: Checkout, proto: str, breaks: bool) -> None:
    checkout.write(PROTO)
    checkout.commit("published")
    checkout.write(proto)
    code, output = checkout.check()
    assert "(published)" in output
    assert (code != 0) == breaks, output


def test_the_last_tag_is_the_reference_even_when_the_break_is_committed(checkout: Checkout) -> None:
    checkout.write(PROTO)
    checkout.commit("released")
    checkout.git("tag", "v0.1.0")
    checkout.write(FIELD_REMOVED)
    checkout.commit("breaks")
    code, output = checkout.check()
    assert "(released)" in output
    assert code != 0
    assert "count" in output


def test_on_a_branch_the_reference_is_where_it_left_main(checkout: Checkout) -> None:
    checkout.write(PROTO)
    checkout.commit("on main")
    checkout.git("checkout", "-q", "-b", "work")
    checkout.write(FIELD_REMOVED)
    checkout.commit("on the branch")
    code, output = checkout.check()
    assert "(on main)" in output
    assert code != 0


def test_without_a_commit_there_is_nothing_to_compare(checkout: Checkout) -> None:
    checkout.write(PROTO)
    code, output = checkout.check()
    assert (code, "nothing to compare" in output) == (0, True)


def test_without_main_and_tags_there_is_nothing_to_compare(checkout: Checkout) -> None:
    checkout.write(PROTO)
    checkout.commit()
    checkout.git("branch", "-m", "main", "work")
    code, output = checkout.check()
    assert (code, "main is not in this clone" in output) == (0, True)


def test_a_reference_without_protos_is_nothing_to_compare(checkout: Checkout) -> None:
    checkout.commit("before the protos")
    checkout.write(PROTO)
    code, output = checkout.check()
    assert (code, "has no protos/" in output) == (0, True)


def test_a_shallow_clone_compares_with_its_only_commit(checkout: Checkout, tmp_path: Path) -> None:
    for message in ("first", "second"):
        checkout.write(PROTO + f"// {message}\n")
        checkout.commit(message)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", checkout.root.as_uri(), clone], check=True)
    code, output = Checkout(clone).check()
    assert (code, "(second)" in output) == (0, True), output


def test_an_unknown_reference_is_an_error_that_names_it(checkout: Checkout) -> None:
    checkout.write(PROTO)
    checkout.commit()
    code, output = checkout.check("v9")
    assert (code, "no revision 'v9'" in output) == (2, True)
