#!/bin/bash
# SmolLM2 with cooperative matrices beside torch.compile, and products beside the CUDA backend:
#   bash bench/webgpu_gpu.sh OUT
# writes OUT/profile.txt (every launch), OUT/smollm2.json and OUT/products.json. The matrices are
# checked first: attention and products against float64. Each part has a limit of time; what the
# last one, every tile of a product, does not reach is left out.
set -u
out="${1:?where to write}"
here="$(cd "$(dirname "$0")" && pwd)"
export PYTHONPATH="$here/../src${PYTHONPATH:+:$PYTHONPATH}"
timeout 30 python "$here/webgpu_check.py" 2>&1 | tail -20
timeout 80 python "$here/webgpu.py" steps smollm2 --precision float16 --matrices --peers compile \
  --profile --table "$out/profile.txt" --lines 45 --turn 0.4 --record "$out/smollm2.json" 2>&1 | tail -60
timeout 25 python "$here/webgpu.py" products --precision float16 --matrices --devices cuda --rounds 3 \
  --sizes 4096 4096 4096 --sizes 8192 576 1536 --sizes 8192 1536 576 --sizes 8192 576 49152 \
  --record "$out/products.json" 2>&1 | tail -8
timeout "${TILES_SECONDS:-15}" python "$here/webgpu_tiles.py" --sizes 8192 576 1536 --sizes 8192 1536 576 2>&1 | tail -8
