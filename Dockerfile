# docker build -t mpu . && docker run --rm -v "$PWD:/work" mpu demo
FROM python:3.11-slim
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY mpu_cli ./mpu_cli
RUN pip install --no-cache-dir -c constraints.txt .
# Identities, server.key and the ledger: in a volume, or they are lost with the container and keys cannot be opened.
# docker run --rm -v "$PWD:/work" -v mpu-config:/config mpu publish …
ENV XDG_CONFIG_HOME=/config
VOLUME /config
WORKDIR /work
ENTRYPOINT ["mpu"]
