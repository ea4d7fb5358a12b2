# Turnwise on an NVIDIA GPU. NOT BUILT HERE: its RUN lines were run one by one on Debian 12, without a GPU (docs/gpu.md).
#     docker build -t turnwise . && docker run --gpus all --ipc=host turnwise .venv/bin/python -m tests.gpu
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends git gcc make bubblewrap python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /turnwise
COPY . .
# The GPU is not visible while an image is built: name the requirements instead of asking for a driver.
RUN TURNWISE_REQUIREMENTS=requirements.txt python3 install.py
