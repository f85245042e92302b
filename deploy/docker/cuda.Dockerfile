# The server on NVIDIA GPUs. JAX's wheels bring CUDA's libraries; the host brings the driver and NVIDIA's container
# toolkit. Built from the repository's root, for CUDA 13 or, with --build-arg CUDA=12, for CUDA 12:
#   docker build -f deploy/docker/cuda.Dockerfile -t jaxserve:cuda13 .
FROM python:3.12.11-slim-bookworm AS build
ARG CUDA=13
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jaxserve jaxserve
COPY pallas_kernels pallas_kernels
COPY checkpoints checkpoints
COPY server server
COPY deploy/docker/slim.py /tmp/slim.py
RUN python -m venv /opt/jaxserve \
    && /opt/jaxserve/bin/pip install --no-cache-dir ".[server,images,cuda${CUDA}]" \
    && python /tmp/slim.py /opt/jaxserve

FROM python:3.12.11-slim-bookworm
LABEL org.opencontainers.image.title="jaxserve" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin jaxserve \
    && mkdir -p /home/jaxserve/.cache/huggingface \
    && chown -R jaxserve:jaxserve /home/jaxserve/.cache \
    && chmod 711 /root
COPY --from=build /opt/jaxserve /opt/jaxserve
COPY --chmod=755 deploy/docker/entrypoint.sh /usr/local/bin/entrypoint
COPY deploy/docker/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/jaxserve/bin:$PATH \
    HOME=/home/jaxserve \
    PYTHONUNBUFFERED=1
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/jaxserve
VOLUME /home/jaxserve/.cache
EXPOSE 8000
# a model may take minutes to load: until it has, the container is "starting"
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "/opt/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["entrypoint"]
CMD ["serve", "--host", "0.0.0.0"]
