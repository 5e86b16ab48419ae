# An image with Meshwright, the Hugging Face stack and the pinned versions of constraints.txt.
#
#     docker build -t meshwright .  # CPU
#     docker build -t meshwright --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#     docker run --gpus all --shm-size 8g -v $PWD:/work meshwright meshwright launch --tp 2 -- train.py
#
# The CUDA wheels of torch bring CUDA and NCCL along, so both images begin from plain Python; the host has the driver.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# torch.compile and triton compile C.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/meshwright
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(sed -n '/^torch==/p' constraints.txt)"
COPY LICENSE README.md pyproject.toml ./
COPY plugin plugin
COPY integrations integrations
# The build of torch that is installed stays; its version is the same.
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt '.[hf]' peft \
    && meshwright --version

WORKDIR /work
CMD ["meshwright", "--help"]
