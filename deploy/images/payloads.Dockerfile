# Payloads: the sidecar that keeps the payloads of a node, read by streams; without Ray.
# `python tools/containers.py images` lays out the folder that this is built in: wheels of ours, and
# of others at the versions of constraints.txt. Nothing here needs a network.
FROM python:3.11-slim AS build
ARG PIP="/pip/bin/pip --quiet --no-cache-dir --disable-pip-version-check"
ARG OPTIONS="--no-index --no-deps"
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/treadle
COPY others /others
RUN $PIP --python /opt/treadle/bin/python install $OPTIONS /others/*.whl
COPY ours /ours
RUN $PIP install $OPTIONS --target /installed /ours/*.whl

FROM python:3.11-slim
RUN useradd --uid 10001 --user-group --create-home treadle
COPY --from=build /opt/treadle /opt/treadle
COPY --from=build /installed /opt/treadle/lib/python3.11/site-packages
ENV PATH=/opt/treadle/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /work
EXPOSE 7005
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-m", "treadle_runtime.probe", "127.0.0.1:7005"]
ENTRYPOINT ["python", "-m", "treadle_payloads.sidecar"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="treadle-payloads" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
