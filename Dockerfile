# docker build -t mpu . && docker run --rm -v "$PWD:/work" mpu demo
FROM python:3.11-slim
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY mpu_cli ./mpu_cli
RUN pip install --no-cache-dir -c constraints.txt .
WORKDIR /work
ENTRYPOINT ["mpu"]
