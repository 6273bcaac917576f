# The model server: docker build -f deploy/serving.Dockerfile -t monolith-serving .
FROM python:3.13-slim-trixie AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make git libnghttp2-dev libssl-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN MONOLITH_PORTABLE_WHEEL=1 pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-trixie
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/monolith_recsys-*.whl)[serving]" && rm -rf /wheels
RUN useradd --create-home monolith
USER monolith
EXPOSE 8500 8501
# Inside a container the ports are reachable only where they are published.
ENTRYPOINT ["python", "-m", "monolith.serving.model_server", "--bind_address=0.0.0.0", "--port=8500", "--rest_api_port=8501"]
CMD ["--model_name=model", "--model_base_path=/models/model"]
