"""A bundle run as a page runs it: buffers, pipelines and launches from the record alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle.base.words import as_words, from_words
from treadle.runtime.webgpu.device import device


class Page:
    """The memory of a bundle, and its programs."""

    def __init__(self, bundle: Mapping[str, Any]):
        self.bundle = json.loads(json.dumps(bundle))  # nothing that JSON does not hold
        self.buffers = {a["name"]: device().buffer(a["bytes"]) for a in self.bundle["arenas"]}
        for name, value in self.bundle["values"].items():
            if "initial" in value:
                self.write_words(name, np.frombuffer(base64.b64decode(value["initial"]), np.uint32))

    def write_words(self, name: str, words: np.ndarray) -> None:
        value = self.bundle["values"][name]
        assert words.nbytes <= value["bytes"], name
        device().write(self.buffers[value["arena"]], value["offset"], words)

    def write(self, name: str, array: np.ndarray) -> None:
        self.write_words(name, as_words(array))

    def read(self, name: str) -> np.ndarray:
        value, here = self.bundle["values"][name], device()
        words = here.read(self.buffers[value["arena"]], value["offset"], value["bytes"])
        dtype = np.dtype(value["dtype"])
        return from_words(words, tuple(value["shape"]), dtype)

    def run(self, program: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of one run by kind and name."""
        found, here = self.bundle["programs"][program], device()
        for leaf, value in found["inputs"].items():
            self.write(value, inputs[leaf])
        encoder = here.device.create_command_encoder()
        part = encoder.begin_compute_pass()
        for launch in found["launches"]:
            arenas = [self.buffers[a] for a in launch["arenas"]]
            text = self.bundle["shaders"][launch["shader"]]
            part.set_pipeline(here.pipelines({text: len(arenas)})[text])
            part.set_bind_group(0, here.arena_group(arenas))
            part.set_bind_group(1, self._arguments(launch["arguments"]), [0])
            part.dispatch_workgroups(*launch["workgroups"])
        part.end()
        here.queue.submit([encoder.finish()])
        return {f"{o['kind']}:{o['name']}": self.read(o["value"]) for o in found["outputs"]}

    def _arguments(self, words: list[int]) -> Any:
        here = device()
        data = np.zeros(2048, np.uint32)
        data[: len(words)] = words
        buffer = here.device.create_buffer_with_data(data=data, usage=here.wgpu.BufferUsage.UNIFORM)
        resource = {"buffer": buffer, "offset": 0, "size": data.nbytes}
        return here.device.create_bind_group(
            layout=here.arguments_layout, entries=[{"binding": 0, "resource": resource}]
        )
