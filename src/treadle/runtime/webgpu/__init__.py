"""Programs on any GPU that WebGPU reaches, through wgpu."""
