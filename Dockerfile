# One image a role: docker build --target gateway -t quire-gateway .   (orchestrator, gateway, scheduler, storage, decoder)
#
# Both builds of UCX are inside: the system's, which has the RDMA transports, serves where there is an RDMA device; PyPI's
# (newer, shm and tcp) serves elsewhere, and is what clients have by `pip install quire[ucx]`. Both ends of a transfer need
# the same minor version of UCX. torch is in the decoder only: the CPU build by default, or --build-arg DECODER=decoder-cuda.
#
# What is installed is in locks/ with its hashes (make locks), and nothing else is. locks/decoder.txt has the hash of torch's
# CPU build for x86_64 and Python 3.11; make locks, where download.pytorch.org answers, adds those for other platforms.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY locks/build.txt locks/
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY libs libs
COPY services services
RUN /opt/build/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON} AS builder
COPY locks/services.txt locks/
RUN python3 -m venv /opt/quire && /opt/quire/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r locks/services.txt
COPY --from=wheel /wheels /wheels
RUN /opt/quire/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl

FROM builder AS decoder-builder
ARG DECODER=decoder
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY locks/${DECODER}.txt locks/
RUN /opt/quire/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -r locks/${DECODER}.txt

FROM ${PYTHON} AS base
RUN apt-get update && apt-get install -y --no-install-recommends libucx0 ibverbs-providers && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /nonexistent --no-create-home quire \
    && mkdir -p /var/lib/quire /var/lib/quire-objects && chown 10001:10001 /var/lib/quire /var/lib/quire-objects
ENV PATH=/opt/quire/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GRPC_ENABLE_FORK_SUPPORT=0
USER 10001
WORKDIR /var/lib/quire
EXPOSE 9464

FROM base AS service
COPY --from=builder /opt/quire /opt/quire

FROM service AS orchestrator
EXPOSE 7411
ENTRYPOINT ["quire-orchestrator"]

FROM service AS gateway
EXPOSE 7410 7480 7481
ENTRYPOINT ["quire-gateway"]

FROM service AS scheduler
EXPOSE 7414
ENTRYPOINT ["quire-scheduler"]

FROM service AS storage
EXPOSE 7412
# Copies to clients of the same host leave the caches alone from 256 KiB on: a third faster.
ENV GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x40000
VOLUME /var/lib/quire
ENTRYPOINT ["quire-storage"]

FROM base AS decoder
COPY --from=decoder-builder /opt/quire /opt/quire
EXPOSE 7415
ENTRYPOINT ["quire-decoder"]
