#!/bin/bash
# SmolLM2 with cooperative matrices beside torch.compile, and products beside the CUDA backend:
#   bash bench/webgpu_gpu.sh OUT
# writes OUT/profile.txt (every launch), OUT/stored.txt (the same where attention stores its scores),
# OUT/smollm2.json and OUT/products.json. The matrices are checked first: attention and products
# against float64. All of it ends after SECONDS_IN_ALL: what the last part, every tile of a product,
# does not reach is left out.
set -u
out="${1:?where to write}"
here="$(cd "$(dirname "$0")" && pwd)"
export PYTHONPATH="$here/../src${PYTHONPATH:+:$PYTHONPATH}"
SECONDS=0
part() { # at most so many seconds, and lines
  local left=$((${SECONDS_IN_ALL:-240} - SECONDS)) most="$1" lines="$2"
  shift 2
  [ "$left" -gt 3 ] && timeout "$((left < most ? left : most))" python3 "$@" 2>&1 | tail "-$lines"
  echo "($SECONDS s so far)"
}
smollm2=("$here/webgpu.py" steps smollm2 --precision float16 --matrices --profile --turn 0.4)
part 30 20 "$here/webgpu_check.py"
part 160 50 "${smollm2[@]}" --peers compile --table "$out/profile.txt" --lines 40 --record "$out/smollm2.json"
TREADLE_CACHE="$out/cache" part 35 30 "${smollm2[@]}" --stored --peers --table "$out/stored.txt" --lines 24
part 25 8 "$here/webgpu.py" products --precision float16 --matrices --devices cuda --rounds 3 \
  --sizes 4096 4096 4096 --sizes 8192 576 1536 --sizes 8192 1536 576 --sizes 8192 576 49152 \
  --record "$out/products.json"
part 60 8 "$here/webgpu_tiles.py" --sizes 8192 576 1536
