"""What is installed: the package map, lazy imports, the name `kernels` left alone, and the layers."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flashattn_hopper

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SHIPPED = ("flashattn_hopper", "kernels", "pyproject.toml", "README.md")


def run(code, cwd, **env):
    """Standard output of a fresh Python that sees installed packages only."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def mapped():
    """(packages, package-dir) of pyproject.toml. Why not tomllib: Python 3.10 has none."""
    packages = re.search(r"^packages = \[(.*?)\]", PYPROJECT, re.S | re.M).group(1)
    folders = re.search(r"^package-dir = \{(.*?)\}", PYPROJECT, re.S | re.M).group(1)
    return set(re.findall(r'"([^"]+)"', packages)), dict(re.findall(r'"([^"]+)" = "([^"]+)"', folders))


def folders_with_code(top):
    found = {path.parent.relative_to(ROOT) for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts}
    return {folder.as_posix() for folder in found}


def test_every_kernel_folder_is_mapped():
    packages, folders = mapped()
    expected = {f"flashattn_hopper.{folder.replace('/', '.')}": folder for folder in folders_with_code("kernels")}
    assert expected
    assert {name: folders.get(name) for name in expected} == expected
    assert set(expected) <= packages
    assert all((ROOT / folder / "__init__.py").exists() for folder in expected.values())
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_package_folder_is_listed_and_exists():
    packages, folders = mapped()
    inside = {folder.replace("/", ".") for folder in folders_with_code("flashattn_hopper")}
    assert packages == inside | (set(folders) - {"flashattn_hopper"})


def test_version_has_one_source():
    assert 'dynamic = ["version"]' in PYPROJECT
    assert version("flashattn-hopper") == flashattn_hopper.__version__
    sources = [
        path
        for path in (ROOT / "flashattn_hopper").rglob("*.py")
        if re.search(r"^__version__ =", path.read_text(), re.M)
    ]
    assert sources == [ROOT / "flashattn_hopper" / "_version.py"]
    # The wheel of the extra `kernels` holds for one version.
    assert f'kernels = ["flashattn-hopper-kernels=={flashattn_hopper.__version__}"]' in PYPROJECT


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "flashattn_hopper, flashattn_hopper.catalog",
            ("torch", "cutlass", "triton", "transformers", "numpy", "typer"),
        ),
        ("flashattn_hopper.api", ("cutlass", "transformers", "typer", "tvm_ffi")),
        ("flashattn_hopper.train.job", ("cutlass", "transformers", "typer", "rich", "matplotlib")),
    ],
)
def test_imports_stay_lazy(tmp_path, modules, absent):
    loaded = run(f"import sys, {modules}; print(*sys.modules)", tmp_path).split()
    assert modules.split(",")[0] in loaded
    assert not set(absent) & set(loaded)


def test_importing_the_package_loads_no_triton(tmp_path):
    """torch itself may load triton where it is installed; ours must not be what does."""
    counted = (
        "import sys, torch; before = set(sys.modules); import flashattn_hopper.api; print(*set(sys.modules) - before)"
    )
    assert not {name for name in run(counted, tmp_path).split() if name.split(".")[0] in ("triton", "cutlass")}


def test_kernels_stays_another_projects_name(tmp_path):
    code = (
        "import importlib.util as u, flashattn_hopper.kernels.sm90; s = u.find_spec('kernels'); print(s and s.origin)"
    )
    where = run(code, tmp_path)
    assert where == "None" or ROOT not in Path(where).parents


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A real, non-editable install of a copy of the sources, without a network."""
    pytest.importorskip("setuptools", minversion="77")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--no-compile", "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        cwd=source,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
def test_wheel_holds_every_module_and_nothing_else(installed):
    def modules(folder):
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}

    sources = modules(ROOT / "flashattn_hopper") | {f"kernels/{name}" for name in modules(ROOT / "kernels")}
    assert modules(installed / "flashattn_hopper") == sources
    assert (installed / "flashattn_hopper" / "py.typed").exists()
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} <= {"flashattn_hopper", "bin"}


@pytest.mark.slow
def test_layers(installed, tmp_path):
    """The import contracts of pyproject.toml hold; a planted upward import breaks them."""
    pytest.importorskip("importlinter")
    config = str(ROOT / "pyproject.toml")
    code = f"from importlinter.cli import lint_imports as lint; print(lint({config!r}, no_cache=True))"
    assert run(code, installed, PYTHONPATH=str(installed)).splitlines()[-1] == "0"
    planted = shutil.copytree(installed, tmp_path / "planted")
    with (planted / "flashattn_hopper" / "spec" / "mask.py").open("a") as file:
        file.write("from flashattn_hopper import planner\n")
    assert run(code, planted, PYTHONPATH=str(planted)).splitlines()[-1] == "1"
