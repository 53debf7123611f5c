"""The `tdx` command, `tdx info`, and the search for an MPI launcher."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

import tdx
from tdx.runtime.errors import TdxError
from tdx.tools import cli, launcher
from tdx.tools.launcher import Launcher, Library, clean_environment, find_launcher
from tests.helpers.commands import run_tdx, tdx_environment


@pytest.mark.smoke
def test_info():
    done = run_tdx("info", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"versions", "mpi", "backend", "limits"}
    assert found["versions"]["triton"]
    assert found["limits"]["cores"] >= 1
    assert found["mpi"]["launcher"]
    done = run_tdx("info")
    assert done.returncode == 0
    assert "init() chooses" in done.stdout


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for name in ("run", "demo", "bench", "info", "doctor"):
        assert name in text


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tdx {tdx.__version__}\n"


@pytest.mark.parametrize("words", [[], ["fly"], ["run"]])
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert "usage: tdx" in capsys.readouterr().err


def test_errors_are_one_line(monkeypatch, capsys):
    def refuse(*_):
        raise TdxError("no launcher, install one")

    monkeypatch.setattr("tdx.tools.run.find_launcher", refuse)
    assert cli.main(["run", "-n", "2", __file__]) == 2
    assert capsys.readouterr().err == "tdx run: no launcher, install one\n"


@pytest.mark.parametrize("words", [["info"], ["run", "-n", "1", "-m", "platform"]])
def test_output_that_nobody_reads(words):
    end, start = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "tdx", *words]
    done = subprocess.run(
        command, stdout=start, stderr=subprocess.PIPE, text=True, env=tdx_environment(), timeout=60
    )
    os.close(start)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def fake_launcher(folder, name, text):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def no_python_launcher(monkeypatch, tmp_path):
    """Python's own folders hold no launcher."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))


def test_launcher_of_the_other_library_is_passed_over(monkeypatch, tmp_path, no_python_launcher):
    fake_launcher(tmp_path / "a", "mpirun", "mpirun (Open MPI) 4.1.4")
    right = fake_launcher(tmp_path / "b", "mpirun", "HYDRA build details: Version: 4.2")
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}:/bin:/usr/bin")
    library = Library("MPICH Version: 5.0", "mpich", str(tmp_path / "lib" / "libmpi.so"))
    assert find_launcher(library) == Launcher(right, "mpich", (4, 2))


def test_launcher_beside_the_library_comes_before_path(monkeypatch, tmp_path, no_python_launcher):
    fake_launcher(tmp_path / "a", "mpirun", "mpirun (Open MPI) 4.1.4")
    right = fake_launcher(tmp_path / "bin", "mpirun", "mpirun (Open MPI) 5.0.11")
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:/bin:/usr/bin")
    library = Library("Open MPI v5.0.11", "openmpi", str(tmp_path / "lib" / "libmpi.so"))
    assert find_launcher(library).path == right


def test_no_launcher_names_the_remedy(monkeypatch, tmp_path, no_python_launcher):
    wrong = fake_launcher(tmp_path / "a", "mpirun", "mpirun (Open MPI) 4.1.4")
    monkeypatch.setenv("PATH", str(tmp_path / "a"))
    with pytest.raises(TdxError, match="pip install mpich") as failure:
        find_launcher(Library("MPICH Version: 5.0", "mpich", ""))
    assert "MPICH Version: 5.0" in str(failure.value)
    assert wrong in str(failure.value)


def test_no_mpi_library(monkeypatch):
    monkeypatch.setattr(launcher, "_PROBE", "raise RuntimeError('cannot load MPI library')")
    with pytest.raises(TdxError, match=r"cannot load MPI library.*pip install"):
        launcher.find_library()


def test_options_of_open_mpi(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    new, old = Launcher("m", "openmpi", (5, 0, 11)), Launcher("m", "openmpi", (4, 1, 4))
    assert "--oversubscribe" in old.command(3)
    assert ":OVERSUBSCRIBE" in new.command(3)
    assert "--allow-run-as-root" not in new.command(3)
    assert "ulfm" in new.command(3, keep_going=True)
    assert "ulfm" not in old.command(3, keep_going=True)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "--allow-run-as-root" in new.command(3)


def test_environment_of_a_job_forgets_the_job_around_it():
    environment = {
        "PMI_RANK": "1",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "MPI_LOCALNRANKS": "4",
        "OMPI_MCA_btl": "self",
        "HOME": "/root",
    }
    assert clean_environment(environment) == {"OMPI_MCA_btl": "self", "HOME": "/root"}
