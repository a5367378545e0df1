#!/bin/sh
# What some tests use beside Python's packages: a Vulkan driver of the processor (Mesa's lavapipe), on
# which WebGPU's shaders run, and Chromium, in which exported pages do. Installed with apt where this
# runs as root; elsewhere the tests that need them are skipped. Never fails.
wanted=""
ls /usr/share/vulkan/icd.d/*.json >/dev/null 2>&1 || wanted="mesa-vulkan-drivers"
command -v chromium >/dev/null 2>&1 || wanted="$wanted chromium"
[ -z "$wanted" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >/dev/null 2>&1
  for package in $wanted; do
    apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
      echo "$package could not be installed: tests that need it are skipped"
  done
else
  echo "not installed:$(printf ' %s' $wanted): tests that need them are skipped"
fi
exit 0
