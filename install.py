"""make setup: create or refresh .venv; an environment that is up to date is left alone.

Runs under the system's Python, whatever its version: plain syntax and the standard library only.
"""

import glob
import hashlib
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
PYTHONS = ((3, 11), (3, 12), (3, 13))
DRIVER = 580  # the oldest NVIDIA driver series for the CUDA 13 builds of torch and vLLM
COMPATIBLE = "/usr/local/cuda-13*/compat/libcuda.so*"  # lets an older driver of a data-centre card run CUDA 13
NEEDED_GB = {"requirements.txt": 20, "requirements-cpu.txt": 6}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM requires them for images and sound. Text models need none of them, and builds that do not match torch break transformers.
UNUSED = ("torchvision", "torchaudio", "torchcodec")


# For --task reasoning_gym:<name> only. A part of it needs a C compiler; without one, set-up continues without the package.
OPTIONAL = ("reasoning-gym==0.1.25",)


def stop(message):
    """Exit with a message."""
    sys.exit("setup: " + message)


def requirements():
    """Return "requirements.txt" on a machine with an NVIDIA GPU, else "requirements-cpu.txt".

    TURNWISE_REQUIREMENTS names one of them where the GPU cannot be seen, as in `docker build`.
    """
    if os.environ.get("TURNWISE_REQUIREMENTS"):
        return os.environ["TURNWISE_REQUIREMENTS"]
    if not shutil.which("nvidia-smi"):
        return "requirements-cpu.txt"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    versions = done.stdout.split()
    if done.returncode != 0 or not versions:
        return "requirements-cpu.txt"  # nvidia-smi is installed, but there is no GPU
    series = versions[0].split(".")[0]
    if not series.isdigit():  # such as [N/A]
        print(
            f"setup: the NVIDIA driver's version is not known ({versions[0]}); the CUDA build needs {DRIVER} or newer."
        )
    elif int(series) < DRIVER and not glob.glob(COMPATIBLE):
        stop(
            f"the NVIDIA driver is {versions[0]}, and the CUDA build needs {DRIVER} or newer (CUDA 13). Update the driver. Where you "
            "cannot, data-centre cards (A100, H100, L40S) also run with an older driver in a container with CUDA 13's compatibility "
            "libraries, such as nvidia/cuda:13.0.2-devel-ubuntu24.04 (docs/gpu.md). Or hide nvidia-smi from PATH to set up for the CPU."
        )
    return "requirements.txt"


def check_compiler(python):
    """Exit with a message if Triton could not build its driver stub: at the first run it needs a C compiler and Python.h."""
    code = "import sys, sysconfig; print(sysconfig.get_path('include')); print('%d.%d' % sys.version_info[:2])"
    include, version = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True).stdout.split()
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler (gcc or clang)")
    if not os.path.exists(os.path.join(include, "Python.h")):
        missing.append(f"the headers of Python {version} ({include}/Python.h)")
    if missing:
        stop(
            f"{' and '.join(missing)} not found. Triton compiles a small file at the first run on a GPU. On Debian and Ubuntu: "
            f"apt install gcc python{version}-dev; then run make setup again."
        )


def find_python():
    """Return the path of this Python if its version is supported, else of the first supported one on PATH."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    for version in PYTHONS:
        found = shutil.which("python{}.{}".format(*version))
        if found:
            return found
    stop(
        "this is Python {}.{}, and Turnwise needs 3.11, 3.12 or 3.13: install one, or name it with "
        "make setup PYTHON=/path/to/python3.12".format(*sys.version_info[:2])
    )


def wanted(name):
    """Return a hash of everything that the virtual environment is made from."""
    with open(os.path.join(HERE, name), "rb") as file:
        made_from = file.read() + repr((UNUSED, OPTIONAL)).encode()
    return f"{name} {hashlib.sha256(made_from).hexdigest()}"


def up_to_date(stamp, name):
    """Return whether .venv matches the requirements; one made for a GPU counts on a machine without (a login node)."""
    try:
        with open(stamp) as file:
            return file.read() in {wanted(name), wanted("requirements.txt")}
    except OSError:
        return False


def install(name, python):
    """Create .venv and install the packages of a requirements file. Exits with a message when that fails."""
    free = shutil.disk_usage(HERE).free / 2**30
    if free < NEEDED_GB[name]:
        stop(f"{free:.0f} GB of disk are free here, and the environment needs {NEEDED_GB[name]} GB: free some space.")
    print(f"setup: installing {name} into .venv (minutes, once)")
    if subprocess.run([python, "-m", "venv", "--clear", VENV]).returncode != 0:
        stop(f"no virtual environment could be created with {python} (on Debian and Ubuntu: apt install python3-venv).")
    pip = [os.path.join(VENV, "bin", "python"), "-m", "pip"]
    command = [*pip, "install", "--disable-pip-version-check", "-r", os.path.join(HERE, name)]
    failed = subprocess.run(command, stderr=subprocess.PIPE if name == "requirements-cpu.txt" else None).returncode
    if (
        failed and name == "requirements-cpu.txt"
    ):  # torch's CPU build is in PyTorch's own index; all else is not asked there
        with open(os.path.join(HERE, name)) as file:
            torch = [line.strip() for line in file if line.startswith("torch==")]
        failed = subprocess.run([*pip, "install", *torch, "--index-url", TORCH_CPU_INDEX]).returncode
        failed = failed or subprocess.run(command).returncode
    if failed:
        stop(
            f"the packages of {name} could not be installed; pip's message is above. If a download failed, run make setup again."
        )
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSED], check=True)
    optional = [*pip, "install", "--disable-pip-version-check", "--quiet", *OPTIONAL]
    if subprocess.run(optional, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
        print("setup: {} could not be installed: --task reasoning_gym:... is not available".format(", ".join(OPTIONAL)))


def main():
    """Create .venv unless it is up to date."""
    name = requirements()
    stamp = os.path.join(VENV, "made-from")
    if name == "requirements.txt":
        check_compiler(find_python())
    if not up_to_date(stamp, name):
        install(name, find_python())
        with open(stamp, "w") as file:
            file.write(wanted(name))


if __name__ == "__main__":
    main()
