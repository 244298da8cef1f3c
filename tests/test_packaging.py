"""The links that make one package of the folders, and the wheel that comes of them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["agent", "controller", "protos", "policies"])
def test_the_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "trimtab" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def test_the_wheel_has_every_part(tmp_path: Path) -> None:
    # By way of the sdist: built in place, a wheel may take parts from an older build/.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    [wheel] = tmp_path.glob("trimtab-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "trimtab/py.typed",
        "trimtab/cli.py",
        "trimtab/demo/train.py",
        "trimtab/agent/__init__.py",
        "trimtab/agent/actions/skip_batch.py",
        "trimtab/controller/daemon.py",
        "trimtab/controller/engine/step.py",
        "trimtab/protos/trimtab.proto",
        "trimtab/protos/trimtab_pb2.py",
        "trimtab/protos/trimtab_pb2.pyi",
        "trimtab/policies/default.yaml",
    } <= names
    assert not any(name.startswith("tests/") for name in names)


def test_the_agent_comes_without_the_controllers_packages() -> None:
    code = (
        "import sys\nfor name in ('ray', 'pydantic', 'sqlalchemy', 'yaml', 'click', 'rich',"
        " 'prometheus_client'): sys.modules[name] = None\nimport trimtab.agent"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_controller_comes_without_torch() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "import trimtab.cli, trimtab.controller.daemon, trimtab.controller.run_actor"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
