# One image a role: docker build --target gateway -t quire-gateway .   (orchestrator, gateway, scheduler, storage, decoder)
#
# UCX is built from a commit of its own repository, with the transports for RDMA devices, which PyPI's build lacks. Version
# 1.22 reaches what clients have: 1.19 to 1.23, the wheels libucx-cu12 and nixl among them (make test-ucx). torch is in the
# decoder only: the CPU build by default, or --build-arg DECODER=decoder-cuda.
#
# What is installed is in locks/ with its hashes (make locks), and nothing else is. locks/decoder.txt has the hash of torch's
# CPU build for x86_64 and Python 3.11; make locks, where download.pytorch.org answers, adds those for other platforms.
#
# Built again, an image has the same bytes, as long as Debian's packages are the same: no file has a time of the build in
# it. CONTRIBUTING.md has the options that set the times of the files themselves.
ARG PYTHON=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Release 1.22.0. The commit's hash names its content, wherever it is fetched from.
FROM ${PYTHON} AS ucx
ARG UCX_REPOSITORY=https://github.com/openucx/ucx.git
ARG UCX_COMMIT=8a6b06fb880accbb933a79cda893883872c68d9d
RUN apt-get update && apt-get install -y --no-install-recommends autoconf automake ca-certificates g++ git libibverbs-dev \
    librdmacm-dev libtool make pkg-config && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN git init -q && git fetch -q --depth 1 "${UCX_REPOSITORY}" "${UCX_COMMIT}" && git checkout -q FETCH_HEAD && ./autogen.sh \
    && ./contrib/configure-release --prefix=/opt/ucx --disable-static --disable-doxygen-doc --with-verbs --without-cuda \
    --without-go --without-java --without-rocm && make -j"$(nproc)" install \
    && rm -rf /opt/ucx/include /opt/ucx/lib/cmake /opt/ucx/lib/pkgconfig /opt/ucx/share \
    && find /opt/ucx -name '*.la' -delete && find /opt/ucx/bin -type f ! -name 'ucx_info' ! -name 'ucx_perftest' -delete \
    && find /opt/ucx -type f \( -name '*.so*' -o -path '*/bin/*' \) -exec strip --strip-unneeded {} +

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
# The base image's pip installs into the environment, which has no pip of its own. Bytecode is compiled once all is there:
# by the content of the sources and not by their time, and in an order of sets that is the same each time.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONHASHSEED=0
ENV COMPILE="python3 -P -m compileall -q -f -x py312_ --invalidation-mode unchecked-hash /opt/quire/lib"
RUN python3 -m venv --without-pip /opt/quire && pip --python /opt/quire/bin/python install --no-compile --require-hashes -r locks/services.txt
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/quire/bin/python install --no-compile --no-deps /wheels/*.whl \
    && find /opt/quire -type d -name tests -prune -exec rm -rf {} +

FROM builder AS service-builder
RUN ${COMPILE}

FROM builder AS decoder-builder
ARG DECODER=decoder
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY locks/${DECODER}.txt locks/
RUN pip --python /opt/quire/bin/python install --no-compile --require-hashes \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -r locks/${DECODER}.txt \
    && cd /opt/quire/lib/python3.11/site-packages/torch && rm -rf include test \
    && find bin -type f ! -name torch_shm_manager -delete && ${COMPILE}

FROM ${PYTHON} AS base
RUN apt-get update && apt-get install -y --no-install-recommends ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/log/* \
    && echo 'quire:x:10001:10001::/nonexistent:/usr/sbin/nologin' >> /etc/passwd && echo 'quire:x:10001:' >> /etc/group \
    && mkdir -p /var/lib/quire /var/lib/quire-objects && chown 10001:10001 /var/lib/quire /var/lib/quire-objects
ENV PATH=/opt/quire/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GRPC_ENABLE_FORK_SUPPORT=0
ENV PYUCX_LIBUCP=/opt/ucx/lib/libucp.so.0
COPY --from=ucx /opt/ucx /opt/ucx
ARG VERSION=0 REVISION=unknown
LABEL org.opencontainers.image.title="Quire" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="KV caches and latents, delivered layer by layer" \
    org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 10001
WORKDIR /var/lib/quire
EXPOSE 9464

FROM base AS service
COPY --from=service-builder /opt/quire /opt/quire

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
