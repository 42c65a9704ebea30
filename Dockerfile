# docker build -t jdist .                              for CPU
# docker build -t jdist:cuda --build-arg EXTRA=cuda .  for NVIDIA GPUs; run it with `docker run --gpus all`
FROM python:3.12-slim

# The name of an extra of pyproject.toml, such as `cuda`; several are separated by commas. The wheels of CUDA come with jax.
ARG EXTRA=export

WORKDIR /opt/jdist
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY jdist ./jdist
COPY jdist_tools ./jdist_tools
RUN python -m pip install --no-cache-dir -c constraints.txt ".[export,${EXTRA}]"

RUN useradd --create-home jdist
USER jdist
WORKDIR /home/jdist
CMD ["jdist", "env"]
