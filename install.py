"""make setup: create or refresh .venv and build the tiny base. Does nothing, at once, when both are up to date.

Runs under the system's Python, whatever its version: plain syntax and the standard library only.
"""

import hashlib
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
PYTHONS = ((3, 11), (3, 12), (3, 13))
DRIVER = 580  # the oldest NVIDIA driver series for the CUDA 13 builds of torch and vLLM
NEEDED_GB = {"requirements.txt": 20, "requirements-cpu.txt": 6}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM lists them for images and sound. Text needs none of them, and where their builds do not fit torch they break transformers.
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def stop(message):
    sys.exit("setup: " + message)


def requirements():
    """requirements.txt on a machine with an NVIDIA GPU, else requirements-cpu.txt."""
    if not shutil.which("nvidia-smi"):
        return "requirements-cpu.txt"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True)
    versions = done.stdout.split()
    if done.returncode != 0 or not versions:
        return "requirements-cpu.txt"  # the tool without a card
    if int(versions[0].split(".")[0]) < DRIVER:
        stop(
            "the NVIDIA driver is {}, and the CUDA build needs {} or newer: update the driver, or hide the GPU's "
            "nvidia-smi from PATH to set up for the CPU.".format(versions[0], DRIVER)
        )
    return "requirements.txt"


def find_python():
    """This Python if its version is supported, else the first supported one on PATH."""
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
    """A hash of everything the virtual environment is made from."""
    digest = hashlib.sha256()
    for path in (os.path.join(HERE, name), os.path.abspath(__file__)):
        with open(path, "rb") as file:
            digest.update(file.read())
    return "{} {}".format(name, digest.hexdigest())


def install(name, python):
    free = shutil.disk_usage(HERE).free / 2**30
    if free < NEEDED_GB[name]:
        stop(
            "{:.0f} GB of disk are free here, and the environment needs {} GB: free some space.".format(
                free, NEEDED_GB[name]
            )
        )
    print("setup: installing {} into .venv (minutes, once)".format(name))
    if subprocess.run([python, "-m", "venv", "--clear", VENV]).returncode != 0:
        stop(
            "no virtual environment could be created with {} (on Debian and Ubuntu: apt install python3-venv).".format(
                python
            )
        )
    pip = [os.path.join(VENV, "bin", "python"), "-m", "pip"]
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", "-r", os.path.join(HERE, name)]
    failed = subprocess.run(command, stderr=subprocess.PIPE if name == "requirements-cpu.txt" else None).returncode
    if failed and name == "requirements-cpu.txt":  # torch's CPU build lies in an index of its own, unless it is at hand
        failed = subprocess.run([*command, "--extra-index-url", TORCH_CPU_INDEX]).returncode
    if failed:
        stop(
            "the packages of {} could not be installed; pip's message is above. When it was a download, run make setup again.".format(
                name
            )
        )
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSED], check=True)


def main():
    name = requirements()
    stamp = os.path.join(VENV, "made-from")
    try:
        with open(stamp) as file:
            made = file.read()
    except OSError:
        made = ""
    if made != wanted(name):
        install(name, find_python())
        with open(stamp, "w") as file:
            file.write(wanted(name))
    # The tiny base is cached under a hash of its source; a file beside the stamp spares the start of Python when nothing changed.
    base = os.path.join(VENV, "tiny-base")
    with (
        open(os.path.join(HERE, "common", "tiny.py"), "rb") as file,
        open(os.path.join(HERE, "common", "tasks.py"), "rb") as tasks,
    ):
        source = hashlib.sha256(file.read() + tasks.read()).hexdigest()
    try:
        with open(base) as file:
            known, path = file.read().split("\n")
    except (OSError, ValueError):
        known, path = "", ""
    if known != source or not os.path.isdir(path):
        built = subprocess.run(
            [os.path.join(VENV, "bin", "python"), "-m", "common.tiny"],
            cwd=HERE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        if built.returncode != 0:
            stop("the tiny base could not be built; see the message above.")
        path = built.stdout.strip().splitlines()[-1]
        with open(base, "w") as file:
            file.write(source + "\n" + path)


if __name__ == "__main__":
    main()
