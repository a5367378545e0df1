#!/usr/bin/env bash
# The op table, four trajectories and the demo on ARM64, under qemu-user: tools/check_target.py there.
#
#   tools/arm64.sh [FOLDER] [--full] [PART …]
#
# FOLDER holds what is unpacked, once (build/arm64 if none is given; about 500 MB); PARTs are ops,
# trajectories and demo. A part of everything takes about ten minutes, --full an hour or more.
#
# It needs two packages, and wheels for ARM64, which pip downloads:
#
#   sudo apt-get install debootstrap qemu-user-static
#
# Packages come from the mirror that this machine's own apt uses, or from $ARM64_MIRROR. Nothing is
# installed outside FOLDER, nothing is run as root, and binfmt need not be set up.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
folder=$here/build/arm64
if [[ $# -gt 0 && $1 != -* && ! $1 =~ ^(ops|trajectories|demo)$ ]]; then
  folder=$(mkdir -p "$1" && cd "$1" && pwd)
  shift
fi
suite=bookworm     # whose Python is 3.11
python=python3.11
root=$folder/root
wheels=$folder/wheels
qemu=qemu-aarch64-static

for needed in "$qemu" debootstrap dpkg-deb; do
  if ! command -v "$needed" > /dev/null && ! [[ -x /usr/sbin/$needed ]]; then
    echo "arm64: $needed is not installed: sudo apt-get install debootstrap qemu-user-static" >&2
    exit 2
  fi
done

# The first mirror that apt itself would use for packages of the distribution.
mirror() {
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2> /dev/null |
    grep -v -e security -e updates | head -n 1
}

if [[ ! -x $root/usr/bin/$python ]]; then
  from=${ARM64_MIRROR:-$(mirror)}
  if [[ -z $from ]]; then
    echo "arm64: apt names no mirror; set ARM64_MIRROR to one of Debian" >&2
    exit 2
  fi
  mkdir -p "$folder"
  packages=$folder/packages
  # Only fetched: unpacking needs neither root nor a configured system.
  PATH=$PATH:/usr/sbin debootstrap --download-only --arch=arm64 \
    --variant=minbase --include=python3 "$suite" "$packages" "$from"
  rm -rf "$root.part" && mkdir -p "$root.part"
  for package in "$packages"/var/cache/apt/archives/*.deb; do
    dpkg-deb --extract "$package" "$root.part"
  done
  mv "$root.part" "$root"
  rm -rf "$packages"
fi

if [[ ! -d $wheels ]]; then
  rm -rf "$wheels.part" && mkdir -p "$wheels.part"
  # Newest first: a wheel for an older glibc is as good.
  platforms=()
  for version in 2_28 2_27 2_26 2_17 2014; do
    [[ $version == 2014 ]] && name=manylinux2014_aarch64 || name=manylinux_${version}_aarch64
    platforms+=(--platform "$name")
  done
  python3 -m pip download --quiet --only-binary=:all: --python-version 3.11 "${platforms[@]}" \
    --dest "$folder/downloads" llvmlite ml_dtypes numpy safetensors
  for wheel in "$folder"/downloads/*.whl; do
    python3 -m zipfile -e "$wheel" "$wheels.part"
  done
  mv "$wheels.part" "$wheels"
fi

emulated=("$qemu" -L "$root" "$root/usr/bin/$python")
export PYTHONPATH=$here/src:$wheels PYTHONHOME=$root/usr TREADLE_CACHE=0
export TREADLE_THREADS=${TREADLE_THREADS:-2}
exec "${emulated[@]}" "$here/tools/check_target.py" "$@" --python "${emulated[*]@Q}"
